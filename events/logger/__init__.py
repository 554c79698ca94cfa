"""One call reaches every destination: checks, conversion to host values, write rates, delivery, fault isolation."""
