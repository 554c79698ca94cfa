"""Trackers: destinations for TensorBoard, W&B, MLflow, Trackio, Comet and webhooks, imported on demand."""
