"""Trackers: destinations for TensorBoard, W&B, MLflow, Trackio and webhooks, imported on demand."""
