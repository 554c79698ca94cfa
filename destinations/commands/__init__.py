"""Commands of `destinations` that belong to no other room: `demo`, `doctor` and `completion`."""
