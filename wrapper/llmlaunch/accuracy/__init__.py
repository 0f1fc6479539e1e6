"""Measured records scored: predictions against measurements, by record, family and margin."""
