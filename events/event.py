"""`Event`: the points of a training run at which callbacks are called."""

from enum import StrEnum

from .errors import UnknownEventError

__all__ = ["Event"]


class Event(StrEnum):
    """A point of the training loop; its value is the name of the `Callback` hook that it calls.

    This is the loop, with every event at its place:

    ```
    # Trainer(...)
    <INIT>
    <BEFORE_LOAD>
    ...                                          # the checkpoint is loaded, if any
    <AFTER_LOAD>

    # Trainer.fit()
    <FIT_START>
    for epoch in ...:
        <ITERATION_START>                        # only at the start of an iteration
        <EPOCH_START>                            # not when resuming inside the epoch
        while True:
            <BEFORE_DATALOADER>                  # also once at the end of the data
            batch = next(train_dataloader)
            <AFTER_DATALOADER>
            <BATCH_START>
            <BEFORE_TRAIN_BATCH>
            for microbatch in batch:
                <BEFORE_FORWARD>
                outputs = model(microbatch)
                <AFTER_FORWARD>
                <BEFORE_LOSS>
                loss = loss_fn(outputs, targets)
                <AFTER_LOSS>
                <BEFORE_BACKWARD>
                loss.backward()
                <AFTER_BACKWARD>
            <AFTER_TRAIN_BATCH>                  # gradients are complete and unscaled
            optimizer.step()
            ...                                  # the timestamp moves to the next batch
            <BATCH_END>
            evaluate()                           # if it is due
            <BATCH_CHECKPOINT>
        ...                                      # the timestamp moves to the next epoch
        <EPOCH_END>                              # not when the run stops inside the epoch
        evaluate()                               # if it is due
        <EPOCH_CHECKPOINT>
        <ITERATION_END>                          # only at the end of an iteration
        <ITERATION_CHECKPOINT>
    <FIT_END>

    # evaluate(), inside fit
    <EVAL_BEFORE_ALL>
    for dataloader in eval_dataloaders:
        <EVAL_START>
        for batch in dataloader:
            <EVAL_BATCH_START>
            <EVAL_BEFORE_FORWARD>
            outputs = model(batch)
            <EVAL_AFTER_FORWARD>
            <EVAL_BATCH_END>
        <EVAL_END>
    <EVAL_AFTER_ALL>

    # Trainer.eval(): the loop over dataloaders above, between these two
    <EVAL_STANDALONE_START>
    <EVAL_STANDALONE_END>

    # Trainer.predict()
    <PREDICT_START>
    for batch in dataloader:
        <PREDICT_BATCH_START>
        <PREDICT_BEFORE_FORWARD>
        outputs = model(batch)
        <PREDICT_AFTER_FORWARD>
        <PREDICT_BATCH_END>
    <PREDICT_END>
    ```

    Names, values and order are the same as in Composer's `Event`.
    `Event("batch_end")`, `Event("BATCH_END")` and `Event.BATCH_END` are the same.

    A callback that reacts to one of them:

    ```python
    class Prints(Callback):
        def run_event(self, event, state, logger):
            if event is Event.BATCH_END:
                print(event.value, state.timestamp.batch)
    ```
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"
    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @classmethod
    def _missing_(cls, value: object) -> "Event":
        """Resolves names in any case; raises UnknownEventError with close matches otherwise."""
        for event in cls:
            if event.value == str(value).lower():
                return event
        raise UnknownEventError(_unknown_message(value, [event.value for event in cls]))

    @property
    def is_before_event(self) -> bool:
        """Whether the event marks a beginning: `BEFORE_*`, `*_START`, `EVAL_BEFORE_ALL` and the like."""
        return "before_" in self.value or self.value.endswith("_start")

    @property
    def is_after_event(self) -> bool:
        """Whether the event marks an end: `AFTER_*`, `*_END`, `EVAL_AFTER_ALL` and the like."""
        return "after_" in self.value or self.value.endswith("_end")

    @property
    def is_eval(self) -> bool:
        """Whether the event belongs to an evaluation, standalone or inside fit."""
        return self.value.startswith("eval")

    @property
    def is_predict(self) -> bool:
        """Whether the event belongs to a prediction."""
        return self.value.startswith("predict")

    @property
    def canonical_name(self) -> str:
        """The name without its side: "batch" for both `BATCH_START` and `BATCH_END`."""
        name = self.value
        for side in ("before_", "after_", "_start", "_end"):
            name = name.replace(side, "")
        return name


def _unknown_message(value: object, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(str(value).lower(), known, n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"The events are {', '.join(known)}."
    return f"event must be one of the {len(known)} events, got {value!r}. {hint}"
