"""The commands `demo`, `doctor` and `completion`."""
