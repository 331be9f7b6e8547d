"""The names of TensorFlow 1 and tf.estimator that behave differently on the runner or are unsupported, with the
reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from runner.classic.compat import install, names
from runner.classic.compat.source import HOOK, INPUT_FN, MODEL_FN, SCRIPT

CHANGED = "changed"
UNSUPPORTED = "unsupported"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What `check` reports about a use of some names.

    Attributes:
      verdict: CHANGED or UNSUPPORTED.
      names: relative to `tensorflow` or `tensorflow.compat.v1` (`train.Saver`), or to `tensorflow` only
        (`compat.v1.metrics.mean`); a name that ends in `.*` means all names below.
      text: the reason and the fix.
      argument: the rule applies only to calls that pass this argument by name, and not None; "": to all uses.
      only_in: the rule applies only to uses in this place (MODEL_FN, INPUT_FN, SCRIPT or HOOK); "": in all places.
      without: the rule does not apply to calls that pass this argument, by name or by position; "": to all calls.
      num_arguments: a call with at least this many positional arguments passes `without` by position.
    """

    verdict: str
    names: tuple[str, ...]
    text: str
    argument: str = ""
    only_in: str = ""
    without: str = ""
    num_arguments: int = 99

    def fits(self, name: str) -> bool:
        for pattern in self.names:
            is_below = pattern.endswith(".*") and f"{name}.".startswith(pattern[:-1])
            if name == pattern or is_below:
                return True
        return False


_GIVEN = "there is no session to feed or run: pass the tensors to model_fn through input_fn"
_EAGER = (
    "outside of model_fn everything is eager, even after disable_v2_behavior(), and this raises RuntimeError: call it "
    "in model_fn, or under `with tf.Graph().as_default():`"
)
_SESSION = (
    "outside of model_fn everything is eager, even after disable_v2_behavior(), and a session cannot run eager "
    "tensors: make them and the session under `with tf.Graph().as_default():`"
)
_NEED_A_GRAPH = (
    "sparse_placeholder gradients hessians compat.v1.metrics.* summary.merge summary.merge_all summary.FileWriter "
    "train.import_meta_graph train.export_meta_graph data.make_initializable_iterator"
)
_LOOPS_OVER_SESSIONS = (
    "train.MonitoredTrainingSession train.MonitoredSession train.SingularMonitoredSession train.ChiefSessionCreator "
    "train.WorkerSessionCreator train.Supervisor"
)
_QUEUES = " ".join([*(f"train.{name}" for name in (*install.PRODUCERS, *install.BATCHES)), *install.READERS])
_NO_RUNNERS = "queue runners do not run here, so a step would wait forever: return a tf.data.Dataset from input_fn"
_CLIPPED = (
    "on several replicas, gradients are clipped as on one device, those of the global batch; in tf.estimator each "
    "replica clipped its own"
)
WRITES = (
    "on several replicas it depends on what is written: what is the same on all, and what is computed from means and "
    "sums over the examples, becomes what it is on one device; anything else is refused. command=dry_run says which"
)
_ASSIGNMENTS = (
    "assign assign_add assign_sub scatter_add scatter_sub scatter_update scatter_nd_add scatter_nd_sub "
    "scatter_nd_update"
)
_RANDOM = "nn.dropout layers.dropout layers.Dropout random_uniform random_normal truncated_normal"

# Place ("": everywhere) -> names, separated by blanks -> text of the finding.
_UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "": {
        _LOOPS_OVER_SESSIONS: (
            "the runner replaces loops over a session: put the graph into a model_fn, and call Estimator.train with "
            "hooks for what the loop did"
        ),
        "train.add_queue_runner train.QueueRunner train.queue_runner.*": _NO_RUNNERS,
        "train.SyncReplicasOptimizer": (
            "it needs queues and a session: RunConfig(train_distribute=tf.distribute.MultiWorkerMirroredStrategy()) "
            "sums the gradients of all workers in each step"
        ),
    },
    MODEL_FN: {"Session InteractiveSession sparse_placeholder": _GIVEN, _QUEUES: _NO_RUNNERS},
    INPUT_FN: {
        "sparse_placeholder": "make the dataset from the sparse tensor: tf.data.Dataset.from_tensor_slices(sparse)",
    },
    SCRIPT: {
        _NEED_A_GRAPH: _EAGER,
        ".make_initializable_iterator": _EAGER,
        ".run": _SESSION,
        ".eval": "outside of model_fn everything is eager, even after disable_v2_behavior(): write .numpy()",
    },
    HOOK: {"RunOptions": "there is no session whose step could be traced: use tf.profiler.experimental"},
}
_CHANGED: Mapping[str, Mapping[str, str]] = {
    INPUT_FN: {
        "placeholder": (
            "a hook can feed it once, before the first step, by running the iterator's initializer; a resumed run "
            "reads the data again from its beginning and drops what it had read"
        ),
    },
    MODEL_FN: {
        "placeholder": (
            "only hooks can feed it, at each step: SessionRunArgs(feed_dict=), FeedFnHook; data comes through input_fn"
        ),
        "keras.optimizers.* optimizers.*": (
            "the gradient is the mean over the global batch, whereas tf.estimator summed the means of the replicas: "
            "for the same updates with several replicas, multiply the learning rate by their number"
        ),
        "clip_by_global_norm clip_by_norm clip_by_average_norm": _CLIPPED,
        _ASSIGNMENTS: WRITES,
        ".assign": WRITES,
        ".assign_add": WRITES,
        ".assign_sub": WRITES,
        ".scatter_add": WRITES,
        ".scatter_sub": WRITES,
        ".scatter_update": WRITES,
        "train.Saver": "model_fn's own Saver has no effect: the runner writes checkpoints, in its format",
        _RANDOM: (
            "random numbers differ from TensorFlow 1's. They depend on the seed, the step and the replica, so a "
            "resumed run draws the same ones as an uninterrupted run"
        ),
    },
    SCRIPT: {
        "placeholder": (
            "outside of model_fn everything is eager: after disable_v2_behavior(), and in files for TensorFlow 1, a "
            "placeholder can only be passed to build_raw_serving_input_receiver_fn; else this raises RuntimeError. "
            "Make placeholders that are fed under `with tf.Graph().as_default():`"
        ),
    },
    HOOK: {
        ".run": (
            "in a training hook, fetches that depend on a batch use the next batch; only placeholders of model_fn and "
            "hooks can be fed, and those of input_fn when iterator.initializer is run"
        ),
    },
    "": {
        "train.FeedFnHook estimator.FeedFnHook": (
            "it can only feed placeholders of model_fn; training then runs one step per loop"
        ),
        "train.replica_device_setter": (
            "this has no effect, since the strategy places variables: use strategy=parameter_server"
        ),
        " ".join(install.SWITCHES): (
            "this has no effect, with a warning: a model_fn is traced as a TensorFlow 1 graph anyway, and everything "
            "else is eager; build other graphs under `with tf.Graph().as_default():`"
        ),
        "py_func py_function numpy_function": (
            "in an input_fn, this prevents saving the position in the data, so a resumed run reads and drops the "
            "batches up to its step; exported models and other processes do not have the Python function"
        ),
        _QUEUES: (
            "in an input_fn, a queue is the dataset of its elements, in the order of num_threads=1; what shuffle_batch "
            "draws differs from TensorFlow 1"
        ),
        "train.Scaffold": (
            "init_op, init_fn, local_init_op and summary_op have an effect in training; saver, ready_op and "
            "ready_for_local_init_op have none, with a warning"
        ),
        "estimator.train_and_evaluate": (
            "if training was finished before, this evaluates and returns the metrics, too; the evaluator process ends "
            "when training ends for any reason; saving_listeners are called under every strategy"
        ),
        "train.import_meta_graph": (
            "the runner writes no graph beside checkpoints; graphs that TensorFlow 1 has written can be read"
        ),
        "estimator.BestExporter": (
            "the best value is stored in model_dir, so a worse model is not exported after a restart"
        ),
        "estimator.FinalExporter": (
            "it exports at the end of training for any reason; tf.estimator did so only at max_steps"
        ),
        " ".join(f"estimator.experimental.{name}" for name in names.EARLY_STOPPING): (
            "works under every strategy, and stores nothing in checkpoints: started again with the hook, a stopped run "
            "stays stopped; without the hook it continues"
        ),
        "estimator.experimental.InMemoryEvaluatorHook": "works under all strategies of one process",
        "distribute.experimental.ParameterServerStrategy distribute.ParameterServerStrategy": (
            "tf.estimator did not support this strategy; here a coordinator passes steps to the workers, and each "
            "worker's gradient is one update"
        ),
        "train.Server distribute.Server": (
            "the runner starts the servers of a cluster itself, and ends them with the run: TF_CONFIG is enough"
        ),
        ".evaluate": (
            "'loss' is the mean over examples, not over batches (except for heads that sum); each example counts once "
            "under every strategy; without a checkpoint, several workers raise ValueError"
        ),
        ".predict": (
            "with RunConfig(eval_distribute=) it runs on all devices of that strategy (in tf.estimator always on one) "
            "and keeps the order of the input; without a checkpoint, several workers raise ValueError"
        ),
    },
}
_WEIGHTED_LOSS = (
    "on several replicas, the weighted mean is over the global batch, as on one device; in tf.estimator each replica "
    "divided by the sum of its own weights"
)
_EVAL_SPEC = (
    "without steps=, 100 batches are evaluated, as in tf.estimator; steps=None evaluates every example exactly once, "
    "also with RunConfig(eval_distribute=)"
)

WITHOUT_EFFECT: Mapping[str, tuple[Any, str]] = {
    "session_config": (
        None,
        "there is no session; tf.config sets threads, memory and devices, and so do run.memory_growth, "
        "run.inter_op_threads and run.intra_op_threads",
    ),
    "device_fn": (None, "the strategy places variables"),
    "protocol": (None, "servers speak gRPC"),
    "session_creation_timeout_secs": (7200, "strategy.timeout_secs is how long workers wait for each other"),
    "experimental_max_worker_delay_secs": (None, "workers begin together"),
}
"""Argument that RunConfig accepts, with a warning -> (its default, the reason why it has no effect)."""

RUN_CONFIG: Mapping[str, str] = {
    **{name: f"has no effect here, with a warning: {reason}" for name, (_, reason) in WITHOUT_EFFECT.items()},
    "experimental_distribute": "there is no standalone client mode: give train_distribute= and eval_distribute=",
}
"""Argument of RunConfig that behaves differently -> text of the finding."""


def _rules(verdict: str, table: Mapping[Any, Mapping[str, str]]) -> Iterator[Rule]:
    for only_in, texts in table.items():
        for some_names, text in texts.items():
            yield Rule(verdict, tuple(some_names.split()), text, only_in=only_in)


RULES: tuple[Rule, ...] = (
    *_rules(UNSUPPORTED, _UNSUPPORTED),
    *_rules(CHANGED, _CHANGED),
    Rule(UNSUPPORTED, ("train.Saver",), _EAGER, only_in=SCRIPT, without="var_list", num_arguments=1),
    Rule(CHANGED, ("Session", "InteractiveSession"), _SESSION, only_in=SCRIPT, without="graph", num_arguments=2),
    Rule(CHANGED, ("estimator.EvalSpec",), _EVAL_SPEC, without="steps", num_arguments=2),
    Rule(CHANGED, ("losses.*",), _WEIGHTED_LOSS, argument="weights"),
    Rule(CHANGED, ("contrib.*",), _CLIPPED, argument="clip_gradients"),  # of optimize_loss
    Rule(CHANGED, ("contrib.*",), _CLIPPED, argument="clip_gradient_norm"),  # of create_train_op
    *(
        Rule(CHANGED, ("estimator.RunConfig", "estimator.tpu.RunConfig"), text, argument)
        for argument, text in sorted(RUN_CONFIG.items())
    ),
)

REMOVED: Mapping[str, str] = {
    "data.experimental.CheckpointInputPipelineHook": "remove it: every checkpoint holds the position in the input",
    "examples.tutorials.mnist": "tf.keras.datasets.mnist.load_data() gives the data",
    "train.SummaryWriter": "use tf.compat.v1.summary.FileWriter",
    "python.pywrap_tensorflow.NewCheckpointReader": "use tf.compat.v1.train.NewCheckpointReader",
}
"""Removed name -> what to use instead of it, and of all names below it."""


WITHOUT_FIX = (
    "has no such name",
    "the runner does not have it",
    "graphs of a session are not supported",
    "programs did not use this module",
)
"""Ends of the texts about names that nothing replaces."""
