"""Small programs of real trainers: `train(name, folder, lr)` logs "loss" at four steps, in two epochs of two.

A program may kill itself before its last step, and continue from the first epoch's checkpoint in another
process. Before that it evaluates, if its trainer can.
"""

import os
import signal
from pathlib import Path

import torch

from destinations import RunDirectory

STEPS, KILLED_AT, SAVED_AT = 4, 3, 2
DATA = torch.arange(8.0).reshape(4, 2)


def kill():
    """Ends this process with SIGKILL, as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def loop(begin, kills):
    """Yields the steps of a custom loop."""
    for step in range(begin, STEPS):
        if kills and step == KILLED_AT:
            kill()
        yield step


def lightning(folder, lr, kills, resumes, *, has_callback=True):
    """Trains with Lightning and our callback."""
    import lightning.pytorch as pl

    from destinations.adapters.lightning_logger import LightningLogger

    class Model(pl.LightningModule):
        def __init__(self, lr):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)

        def on_train_batch_start(self, batch, batch_idx):
            if kills and self.global_step == KILLED_AT:
                kill()

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", self.layer(batch).mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    logger = LightningLogger(RunDirectory(folder))
    trainer = pl.Trainer(
        logger=logger,
        callbacks=[logger.callback()] if has_callback else [],
        max_epochs=2,
        accelerator="cpu",
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = Model(lr), torch.utils.data.DataLoader(DATA, batch_size=2)
    if resumes:
        trainer.validate(model, data, verbose=False)
    checkpoint = folder / "checkpoints" / f"epoch=0-step={SAVED_AT}.ckpt"
    trainer.fit(model, data, ckpt_path=checkpoint if resumes else None)
    checkpoints = list(Path(trainer.checkpoint_callback.dirpath).iterdir())
    assert {one.parent.parent for one in checkpoints} == {Path(logger.save_dir)}, checkpoints


def lightning_alone(folder, lr, kills, resumes):
    """Trains with Lightning and only our logger."""
    lightning(folder, lr, kills, resumes, has_callback=False)


def hugging_face(folder, lr, kills, resumes):
    """Trains with the Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from destinations.adapters.hugging_face import TransformersCallback

    class Kills(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if kills and state.global_step == KILLED_AT:
                kill()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean(), "logits": self.layer(x)}

    data = [{"x": row, "labels": row[:1]} for row in DATA]
    out = str(folder) + ".out"
    arguments = TrainingArguments(
        out,
        learning_rate=lr,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="epoch" if kills else "no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    ours = TransformersCallback(RunDirectory(folder))
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[ours, Kills()])
    if resumes:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{SAVED_AT}" if resumes else None)


def accelerate(folder, lr, kills, resumes):
    """Trains with Accelerate, and resumes with `load_state` after `init_trackers`."""
    from accelerate import Accelerator

    from destinations.adapters.accelerate_tracker import AccelerateTracker

    saved = str(folder) + ".state"
    accelerator = Accelerator(log_with=AccelerateTracker(RunDirectory(folder)), cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.init_trackers("mine", config={"lr": lr})
    if resumes:
        accelerator.log({"val": model(DATA).mean().item()}, step=0)
        accelerator.load_state(saved)
    for step in loop(SAVED_AT if resumes else 0, kills):
        if kills and step == SAVED_AT:
            accelerator.save_state(saved)
        accelerator.log({"loss": 1.0 / lr}, step=step)


def torchrl(folder, lr, kills, resumes):
    """Logs like a torchrl trainer, and resumes with the logger's state."""
    from destinations.adapters.torchrl_logger import TorchRLLogger

    saved = str(folder) + ".state"
    logger = TorchRLLogger(RunDirectory(folder))
    logger.log_hparams({"lr": lr})
    if resumes:
        logger.log_scalar("val", 1.0, step=0)
        logger.load_state_dict(torch.load(saved, weights_only=False))
    for step in loop(SAVED_AT if resumes else 0, kills):
        if kills and step == SAVED_AT:
            torch.save(logger.state_dict(), saved)
        logger.log_scalar("loss", 1.0 / lr, step=step)


def keras(folder, lr, kills, resumes):
    """Trains with Keras, and resumes with `initial_epoch`."""
    import keras
    import numpy as np

    from destinations.adapters.keras_callback import KerasCallback

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.save(saved)

        def on_train_batch_begin(self, batch, logs=None):
            if kills and int(self.model.optimizer.iterations) == KILLED_AT:
                kill()

    saved = str(folder) + ".keras"
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    ours = KerasCallback(RunDirectory(folder))
    if resumes:
        model = keras.saving.load_model(saved)
        model.evaluate(x, y, batch_size=2, callbacks=[ours], verbose=0)
    else:
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(lr))
    more = {"initial_epoch": 1} if resumes else {}
    model.fit(
        x, y, epochs=2, batch_size=2, callbacks=[ours, *([Saves()] if kills else [])], verbose=0, **more
    )


def ours(folder, lr, kills, resumes):
    """Trains with our own trainer, and resumes with `autoresume`."""
    from events import Callback, Trainer

    class Kills(Callback):
        def batch_start(self, state, logger):
            if kills and int(state.timestamp.batch) == KILLED_AT:
                kill()

    model = torch.nn.Linear(2, 1)
    trainer = Trainer(
        model,
        [(row[None], row[None, :1]) for row in DATA[:2]],
        max_duration="2ep",
        loss_fn=torch.nn.functional.mse_loss,
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        loggers=[RunDirectory(folder)],
        callbacks=[Kills()],
        run_name="mine",
        save_folder=str(folder) + ".checkpoints" if kills or resumes else None,
        autoresume=resumes,
    )
    trainer.fit()
    trainer.close()


def own_loop(folder, lr, kills, resumes):
    """Trains in a custom loop, and resumes with `fit_start`."""
    from events import Run

    run = Run([RunDirectory(folder)], run_name="mine")
    run.log_hyperparameters({"lr": lr})
    run.flush()
    if resumes:
        run.log_metrics({"val": 1.0}, step=0)
        run.fit_start(epoch=1, batch=SAVED_AT)
    for _ in loop(SAVED_AT if resumes else 0, kills):
        run.batch_start()
        run.log_metrics({"loss": 1.0 / lr})
        run.batch_end()
    run.close()


TRAINERS = {
    one.__name__: one
    for one in (lightning, lightning_alone, hugging_face, accelerate, torchrl, keras, ours, own_loop)
}


def train(name, folder, lr, *, kills=False, resumes=False):
    """Runs the program of a trainer."""
    TRAINERS[name](Path(folder), lr, kills, resumes)
