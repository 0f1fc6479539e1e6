"""How often a job is stopped that nobody wanted to stop: a published rate, joined by what the store's own runs had.

Stops are a Poisson process over device-hours. The rate has a gamma distribution: the published one with the weight of
few stops, because sites differ by several times, updated by the store's own stops and device-hours (the conjugate
posterior). So a store that has seen much decides, and one that has seen little changes little.
"""

from __future__ import annotations

import math

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.rundir.values import counted

# Llama 3: 419 unplanned interruptions in 54 days on 16,384 GPUs (Dubey et al. 2024, arXiv 2407.21783, section 3.3.4).
PUBLISHED_STOPS, PUBLISHED_DEVICE_HOURS = 419, 54 * 24 * 16_384
# The weight of the published rate, in stops. With 2, nine sites of ten lie between 0.18 and 2.4 times its rate. Meta's
# own two research clusters had 6.5 and 2.34 failures in 1,000 node-days of eight GPUs (Kokolis et al. 2024, arXiv
# 2410.21680), which is 1.7 and 0.6 times.
PUBLISHED_WEIGHT = 2.0
# The normal distribution's quantiles at 1/18, 3/18 ... 17/18. The standard library's NormalDist takes 10 ms to import.
NORMAL_LEVELS = np.array([-1.593219, -0.967422, -0.589456, -0.282216, 0.0, 0.282216, 0.589456, 0.967422, 1.593219])
TELLING_SHARE = 0.05  # of the published weight: runs of fewer hours are not worth a word


@frozen
class StopRate:
    """The rate of unplanned stops, as far as it is known: `stops` in `device_hours` of the store's own runs."""

    stops: int = 0
    device_hours: float = 0.0

    @property
    def _shape(self) -> float:
        return PUBLISHED_WEIGHT + self.stops

    @property
    def per_device_hour(self) -> float:
        """The mean of the rate."""
        published_hours = PUBLISHED_WEIGHT * PUBLISHED_DEVICE_HOURS / PUBLISHED_STOPS
        return self._shape / (published_hours + self.device_hours)

    @property
    def equally_likely(self) -> FloatColumn:
        """Nine equally likely rates per device-hour, ascending, with the mean of the distribution.

        By Wilson and Hilferty's approximation of the gamma distribution (1931), which is within 1 % from shape 2 on.
        """
        spread = 1.0 / (9.0 * self._shape)
        relative = (1.0 - spread + NORMAL_LEVELS * math.sqrt(spread)) ** 3
        scaled: FloatColumn = self.per_device_hour * relative / relative.mean()
        return scaled

    @property
    def source(self) -> str:
        """Where the rate comes from, for a person."""
        if self.device_hours < TELLING_SHARE * PUBLISHED_WEIGHT * PUBLISHED_DEVICE_HOURS / PUBLISHED_STOPS:
            return "Llama 3's rate"
        return f"Llama 3's rate and {counted(self.stops, 'stop')} in {self.device_hours:,.0f} GPU-hours of your own"


PUBLISHED_RATE = StopRate()  # of a store without runs
