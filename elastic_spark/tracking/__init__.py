"""One job, one MLflow run, and a true one. The only package that imports mlflow (2.13 to 3.x).

Three parts: `core.records` says what of each event is told (pure); `spool` is the file where it waits while the store
is away; `store` speaks MLflow. `tracker` is the thread that joins them:

::

    controller --publish()--> bounded queue --> records --> MLflow answers? --yes--> log_batch, LoggedModel, ...
                                                               | no                      ^
                                                               +--> spool file --in order, when it answers again

Rules:

* Only the driver talks to MLflow, through ``MlflowClient`` with an explicit run id. The user's active run, tracking URI
  and environment are read and never changed; their active run becomes the parent of ours and is never ended.
* No call of ours waits for the store: every request runs in a thread of its own with a limit, and a request that does
  not come back is left behind. Deliveries can be repeated: the same point twice is one point, a run or a model that may
  exist already is looked for before it is made again.
* What the store refuses is said, once, and never blocks what follows.
"""

from elastic_spark.tracking.left import replay
from elastic_spark.tracking.search import find_checkpoint
from elastic_spark.tracking.tracker import Tracker

__all__ = ["Tracker", "find_checkpoint", "replay"]
