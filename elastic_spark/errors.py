"""Every exception that elastic_spark raises on purpose.

::

    ElasticSparkError
    ├── ConfigError               an option, or a combination of options, that cannot work
    │   └── ResumeRefused         a start that differs from its checkpoint in what the guarantees rest on
    ├── EnvironmentUnfit          no usable SparkContext, Horovod, Java ...: says what to install or to switch on
    ├── DataError                 data that cannot be trained on: names the column, the file or the count
    ├── NotEnoughWorkers          fewer workers than `min_num_proc` for longer than the limit
    ├── ResetLimitReached         more resets than `reset_limit`
    ├── UserCodeFailed            the user's function raised; carries the traceback of the worker it was raised on
    ├── StateDiverged             workers disagree about a tensor after a reset; names it
    ├── GuardStopped              a loss that is not finite or has jumped, and `guard` does not let the job go on
    ├── CheckpointError
    │   ├── CheckpointInvalid     a checkpoint that does not verify: says which file and why
    │   └── StorageFailed         the checkpoint storage cannot be written or read
    ├── JobHeld                   another driver holds the job of this name
    ├── JobCancelled              cancelled, interrupted, terminated, or the SparkContext was stopped
    └── ProtocolError             a peer that does not speak our protocol, or has not the job's key

Messages say what was seen, where, the likely cause, and the option to change. Errors of foreign libraries never leave
the package bare: they are the ``__cause__`` of one of these.
"""

from __future__ import annotations


class ElasticSparkError(Exception):
    """Base of all errors raised by elastic_spark."""


class ConfigError(ElasticSparkError, ValueError):
    """An option, or a combination of options, that cannot work."""


class ResumeRefused(ConfigError):
    """The checkpoint to resume from and this start differ in data, seed, global batch or lanes. The message says in
    what, and what to do: going on would train rows twice and others never."""


class EnvironmentUnfit(ElasticSparkError, RuntimeError):
    """The surroundings cannot host a job: no SparkContext, no Horovod with torch, no Java."""


class DataError(ElasticSparkError, ValueError):
    """Data that cannot be trained on. The message names the column, the file or the count."""


class NotEnoughWorkers(ElasticSparkError, TimeoutError):
    """Fewer workers than ``min_num_proc`` for longer than ``start_timeout`` or ``elastic_timeout``."""


class ResetLimitReached(ElasticSparkError):
    """The job was reset more often than ``reset_limit`` allows."""


class UserCodeFailed(ElasticSparkError):
    """The user's function raised. ``traceback_text`` is the worker's own traceback, also shown in the message."""

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


class StateDiverged(ElasticSparkError):
    """After a reset, workers hold different values of a tensor or an attribute. The message names it."""


class GuardStopped(ElasticSparkError):
    """A committed value is not finite, or jumped after a resize, and the policy ``guard`` ends the job for it."""


class CheckpointError(ElasticSparkError):
    """Base of errors about checkpoints."""


class CheckpointInvalid(CheckpointError):
    """A checkpoint that does not verify. The message says which file and why."""


class StorageFailed(CheckpointError, OSError):
    """The checkpoint storage cannot be written or read."""


class JobHeld(ElasticSparkError):
    """Another living driver holds the job of this name."""


class JobCancelled(ElasticSparkError):
    """The job was cancelled: Ctrl-C, SIGTERM, a cancelled job group, or a stopped SparkContext."""


class ProtocolError(ElasticSparkError, ConnectionError):
    """A peer that does not speak our protocol, or does not have the job's key."""
