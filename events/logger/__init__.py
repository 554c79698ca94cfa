"""Delivery of records to destinations: checks, host values, write rates, device copies, fault isolation."""
