"""The supported names of tf.contrib 1.15, where each is defined, and what to use instead of other names."""

from __future__ import annotations

from collections.abc import Mapping

from runner.classic.compat.names import EARLY_STOPPING
from runner.classic.compat.old_modules import MODULE, Space, by_name, modules_of, places_in, text_of, within
from runner.system.suggestions import did_you_mean

NAMES: Mapping[str, str] = places_in(
    f"""
# --- layers, framework, slim: the package tf_slim ---
layers slim @ tf_slim.layers:
    avg_pool2d avg_pool3d batch_norm bias_add conv1d conv2d conv3d conv2d_in_plane conv2d_transpose conv3d_transpose
    convolution convolution1d convolution2d convolution2d_in_plane convolution2d_transpose convolution3d
    convolution3d_transpose dense_to_sparse dropout elu flatten fully_connected gdn images_to_sequence layer_norm linear
    pool max_pool2d max_pool3d one_hot_encoding relu relu6 repeat scale_gradient separable_conv2d
    separable_convolution2d sequence_to_images softmax spatial_softmax stack unit_norm legacy_fully_connected
    legacy_linear legacy_relu maxout instance_norm group_norm xavier_initializer xavier_initializer_conv2d
    variance_scaling_initializer l1_regularizer l2_regularizer l1_l2_regularizer sum_regularizer apply_regularization
    optimize_loss adaptive_clipping_fn OPTIMIZER_CLS_NAMES OPTIMIZER_SUMMARIES summarize_tensor summarize_tensors
    summarize_collection summarize_activation summarize_activations
framework slim @ tf_slim.ops.variables:
    add_model_variable assert_global_step assert_or_get_global_step assign_from_values assign_from_values_fn
    create_global_step filter_variables get_local_variables get_model_variables get_trainable_variables
    get_unique_variable get_variables_by_name get_variables_by_suffix get_variable_full_name get_variables_to_restore
    get_variables global_variable local_variable model_variable variable VariableDeviceChooser
framework slim @ tf_slim.ops.arg_scope:
    add_arg_scope arg_scope arg_scope_func_key arg_scoped_arguments current_arg_scope has_arg_scope
framework slim @ tensorflow:compat.v1.train: get_global_step get_or_create_global_step
framework @ tensorflow:compat.v1.train: init_from_checkpoint list_variables load_checkpoint load_variable
framework @ runner.tf_private.v1: deprecated deprecated_arg_values deprecated_args
framework @ tensorflow:compat.v1: argsort sort is_tensor nest
losses slim.losses @ tf_slim.losses:
    absolute_difference add_loss compute_weighted_loss cosine_distance get_losses get_regularization_losses
    get_total_loss hinge_loss log_loss mean_pairwise_squared_error mean_squared_error sigmoid_cross_entropy
    softmax_cross_entropy sparse_softmax_cross_entropy
metrics slim.metrics @ tf_slim.metrics:
    accuracy f1_score auc_using_histogram aggregate_metric_map aggregate_metrics auc_with_confidence_intervals
    cohen_kappa count precision_at_recall precision_recall_at_equal_thresholds recall_at_precision
    sparse_recall_at_top_k streaming_accuracy streaming_auc streaming_concat streaming_covariance
    streaming_curve_points streaming_dynamic_auc streaming_false_negative_rate
    streaming_false_negative_rate_at_thresholds streaming_false_negatives streaming_false_negatives_at_thresholds
    streaming_false_positive_rate streaming_false_positive_rate_at_thresholds streaming_false_positives
    streaming_false_positives_at_thresholds streaming_mean streaming_mean_absolute_error streaming_mean_cosine_distance
    streaming_mean_iou streaming_mean_relative_error streaming_mean_squared_error streaming_mean_tensor
    streaming_pearson_correlation streaming_percentage_less streaming_precision streaming_precision_at_thresholds
    streaming_recall streaming_recall_at_k streaming_recall_at_thresholds streaming_root_mean_squared_error
    streaming_sensitivity_at_specificity streaming_sparse_average_precision_at_k
    streaming_sparse_average_precision_at_top_k streaming_sparse_precision_at_k streaming_sparse_precision_at_top_k
    streaming_sparse_recall_at_k streaming_specificity_at_sensitivity streaming_true_negatives
    streaming_true_negatives_at_thresholds streaming_true_positives streaming_true_positives_at_thresholds
metrics @ tensorflow:compat.v1: confusion_matrix
metrics @ tensorflow:compat.v1.sets:
    set_difference=difference set_intersection=intersection set_size=size set_union=union
slim.learning @ tf_slim.learning: add_gradients_summaries clip_gradient_norms create_train_op multiply_gradients
slim.nets @ tf_slim.nets:
    alexnet inception inception_v1 inception_v2 inception_v3 overfeat resnet_utils resnet_v1 resnet_v2 vgg
slim @ tf_slim: data_decoder dataset model_analyzer summaries tfexample_decoder
losses.metric_learning @ tf_slim.losses.metric_learning:
    cluster_loss contrastive_loss lifted_struct_loss npairs_loss npairs_loss_multilabel triplet_semihard_loss
framework @ tf_slim.ops.framework_ops: get_graph_from_inputs get_name_scope
training @ tf_slim.training.training:
    add_gradients_summaries clip_gradient_norms clip_gradient_norms_fn create_train_op multiply_gradients
# --- tf.estimator ---
estimator @ tensorflow:compat.v1.estimator:
    BaselineEstimator DNNEstimator DNNLinearCombinedEstimator LinearEstimator add_metrics
    binary_classification_head=BinaryClassHead logistic_regression_head=LogisticRegressionHead multi_head=MultiHead
    multi_class_head=MultiClassHead multi_label_head=MultiLabelHead
estimator @ tensorflow:compat.v1.estimator.experimental:
    {" ".join(EARLY_STOPPING)} InMemoryEvaluatorHook build_raw_supervised_input_receiver_fn call_logit_fn
    dnn_logit_fn_builder linear_logit_fn_builder make_stop_at_checkpoint_step_hook
tpu @ tensorflow:compat.v1.estimator.tpu: InputPipelineConfig RunConfig TPUConfig TPUEstimator TPUEstimatorSpec
# --- the rest of TensorFlow ---
tpu @ tensorflow:compat.v1.tpu: CrossShardOptimizer bfloat16_scope
rnn @ tensorflow:compat.v1.nn.rnn_cell:
    BasicLSTMCell BasicRNNCell DeviceWrapper DropoutWrapper GRUCell LSTMCell LSTMStateTuple MultiRNNCell
    ResidualWrapper RNNCell
rnn @ tensorflow:compat.v1.nn: static_rnn static_bidirectional_rnn static_state_saving_rnn
data @ tensorflow:compat.v1.data.experimental:
    AUTOTUNE Counter CsvDataset Optional RandomDataset Reducer SqlDataset TFRecordWriter
    bucket_by_sequence_length choose_from_datasets copy_to_device dense_to_sparse_batch enumerate_dataset
    get_next_as_optional get_single_element group_by_reducer group_by_window ignore_errors
    make_batched_features_dataset make_csv_dataset map_and_batch parallel_interleave prefetch_to_device
    rejection_resample sample_from_datasets scan shuffle_and_repeat unbatch unique
data @ tensorflow:compat.v1.data: Dataset FixedLengthRecordDataset Iterator TFRecordDataset TextLineDataset
signal @ tensorflow:signal:
    fftshift frame hamming_window hann_window ifftshift inverse_stft inverse_stft_window_fn
    linear_to_mel_weight_matrix mfccs_from_log_mel_spectrograms overlap_and_add stft
cluster_resolver @ tensorflow:distribute.cluster_resolver:
    ClusterResolver GCEClusterResolver KubernetesClusterResolver SimpleClusterResolver SlurmClusterResolver
    TFConfigClusterResolver TPUClusterResolver UnionClusterResolver=UnionResolver
feature_column @ tensorflow:compat.v1.feature_column:
    sequence_categorical_column_with_hash_bucket sequence_categorical_column_with_identity
    sequence_categorical_column_with_vocabulary_file sequence_categorical_column_with_vocabulary_list
    sequence_numeric_column
layers @ tensorflow:compat.v1.nn: safe_embedding_lookup_sparse
layers @ tensorflow:compat.v1.feature_column:
    bucketized_column create_feature_spec_for_parsing=make_parse_example_spec shared_embedding_columns
distribute @ tensorflow:distribute: OneDeviceStrategy get_strategy has_strategy
distribute @ tensorflow:tpu.experimental: initialize_tpu_system
summary @ tensorflow:summary: flush
summary @ tensorflow:compat.v1.summary: all_summary_ops=all_v2_summary_ops initialize
lookup @ runner.tf_private.v1:lookup_tables:
    FastHashSpec HashTable HasherSpec IdTableWithHashBuckets InitializableLookupTableBase LookupInterface
    KeyValueTensorInitializer MutableHashTable StrongHashSpec TextFileIdTableInitializer TextFileIndex
    TextFileInitializer TextFileStringTableInitializer index_table_from_file index_to_string_table_from_file
# --- runner.classic.contrib itself ---
layers @ runner.classic.contrib.layers:
    bow_encoder crossed_column embed_sequence embedding_column
    one_hot_column real_valued_column sparse_column_with_hash_bucket sparse_column_with_integerized_feature
    sparse_column_with_keys sparse_column_with_vocabulary_file weighted_sparse_column
framework slim @ runner.classic.contrib.framework: assign_from_checkpoint assign_from_checkpoint_fn
training @ runner.classic.contrib.training: HParams parse_values
estimator @ runner.classic.contrib.estimator:
    TowerOptimizer clip_gradients_by_norm export_all_saved_models forward_features poisson_regression_head
    regression_head replicate_model_fn
opt @ runner.classic.contrib.opt:
    AdaMaxOptimizer AdamWOptimizer DecoupledWeightDecayExtension LARSOptimizer LazyAdamOptimizer
    MomentumWOptimizer NadamOptimizer extend_with_decoupled_weight_decay
rnn @ runner.classic.contrib.rnn:
    FusedRNNCell FusedRNNCellAdaptor GRUBlockCellV2 LSTMBlockCell LSTMBlockFusedCell LayerNormBasicLSTMCell
    TimeReversedFusedRNN stack_bidirectional_dynamic_rnn stack_bidirectional_rnn
data @ runner.classic.contrib.data:
    assert_element_shape batch_and_drop_remainder padded_batch_and_drop_remainder sloppy_interleave
lookup @ runner.classic.contrib.data: index_table_from_tensor index_to_string_table_from_tensor
learn @ runner.classic.contrib.learn: ModeKeys RunConfig select_last_activations
distribute @ runner.classic.contrib.distribute:
    AllReduceCrossDeviceOps CollectiveAllReduceStrategy MirroredStrategy TPUStrategy
summary @ runner.classic.contrib.summary:
    always_record_summaries create_file_writer histogram image never_record_summaries
    record_summaries_every_n_global_steps scalar
predictor @ runner.classic.contrib.predictor: from_estimator from_saved_model
crf @ runner.classic.contrib.crf:
    crf_binary_score crf_decode crf_log_likelihood crf_log_norm crf_sequence_score crf_unary_score viterbi_decode
seq2seq @ runner.classic.contrib.seq2seq:
    BasicDecoder BasicDecoderOutput BeamSearchDecoder BeamSearchDecoderOutput BeamSearchDecoderState CustomHelper
    Decoder FinalBeamSearchDecoderOutput GreedyEmbeddingHelper Helper SampleEmbeddingHelper TrainingHelper
    dynamic_decode sequence_loss tile_batch
seq2seq @ runner.classic.contrib.attention:
    AttentionMechanism AttentionWrapper AttentionWrapperState BahdanauAttention LuongAttention
"""
)
"""`tf.contrib.<name>` -> "module:attribute"."""

GONE: Mapping[str, str] = by_name(
    {
        "all_reduce nccl": "a strategy sums gradients: use tf.distribute.MirroredStrategy",
        "autograph": "use tf.autograph",
        "batching": "use tf.nondifferentiable_batch_function",
        "bayesflow distributions": "use the package tensorflow_probability",
        "boosted_trees tensor_forest": "use the package tensorflow_decision_forests",
        "cmake": "programs did not use this module",
        "coder": "use the package tensorflow_compression",
        "compiler": "use train.jit (RunConfig(jit=True)) or tf.function(jit_compile=True)",
        "constrained_optimization": "use the package tensorflow_constrained_optimization",
        "copy_graph graph_editor": "graphs of a session are not supported",
        "cudnn_rnn": "use tf.keras.layers.LSTM or tf.keras.layers.GRU: they use cuDNN where they can",
        "distribute.DistributeConfig": "give RunConfig train_distribute= and eval_distribute=",
        "eager": "TensorFlow 2 is eager outside of model_fn: tf.Variable, tf.GradientTape, tf.data",
        "factorization": "use sklearn.cluster or sklearn.decomposition",
        "factorization.KMeansClustering": "use sklearn.cluster.MiniBatchKMeans",
        "feature_column.sequence_input_layer": (
            "use tf_keras.experimental.SequenceFeatures, whose variables have other names"
        ),
        "ffmpeg": "use tf.audio or the package tensorflow_io",
        "gan": "use the package tensorflow_gan",
        "hparams": "HParams is in contrib.training",
        "image resampler rnn.NASCell": "the package tensorflow_addons had it; copy its source into your project",
        (
            "input_pipeline slim.data_provider slim.dataset_data_provider slim.parallel_reader slim.prefetch_queue "
            "slim.queues training.batch_sequences_with_states"
        ): "queue runners do not run here: return a tf.data.Dataset from input_fn",
        "integrate": "use tfp.math.ode of the package tensorflow_probability, or scipy.integrate",
        "kafka": "use the package tensorflow_io",
        "kernel_methods": "use tf_keras.layers.experimental.RandomFourierFeatures",
        "learn": "tf.estimator has it: Estimator, TrainSpec, EvalSpec, train_and_evaluate",
        "learn.datasets": "use tf.keras.datasets",
        "learn.Experiment": "use tf.estimator.train_and_evaluate with TrainSpec and EvalSpec",
        "learn.io learn.read_batch_features": "use tf.data.experimental.make_batched_features_dataset",
        "learn.learn_runner training.evaluate_repeatedly": "use tf.estimator.train_and_evaluate",
        "learn.make_export_strategy": "use tf.estimator.FinalExporter or LatestExporter in EvalSpec(exporters=)",
        "learn.monitors": (
            "use hooks: tf.estimator.LoggingTensorHook, tf.estimator.experimental.stop_if_no_decrease_hook"
        ),
        "learn.preprocessing": "use tf.keras.layers.TextVectorization or sklearn.preprocessing",
        "learn.run_n": "use tf.data and Estimator.predict",
        "legacy_seq2seq": "use contrib.seq2seq",
        "linear_optimizer": "use tf.estimator.LinearClassifier(optimizer='Ftrl')",
        "lite": "use tf.lite",
        "memory_stats": "use tf.config.experimental.get_memory_info",
        "opt.ElasticAverageOptimizer opt.ModelAverageOptimizer": (
            "use a strategy: tf.distribute.MultiWorkerMirroredStrategy"
        ),
        "opt.ExternalOptimizerInterface opt.ScipyOptimizerInterface": (
            "it needs a session: use scipy.optimize.minimize on tf.function's gradients"
        ),
        "opt.MovingAverageOptimizer": "use tf.train.ExponentialMovingAverage in model_fn",
        "periodic_resample": "reshape and transpose",
        "quantization quantize": "use the package tensorflow_model_optimization",
        "saved_model": "use tf.saved_model",
        "slim.evaluation training.evaluate_once": "use Estimator.evaluate",
        "slim.learning training.train": (
            "the runner replaces loops over a session: call Estimator.train with hooks for what the loop did"
        ),
        "specs": "call the layers directly",
        "staging": "tf.data prefetches to devices",
        "stateless": "use tf.random.stateless_uniform and the like",
        "summary": "use tf.summary",
        "tensorboard": "use the package tensorboard",
        "tensorrt": "use tf.experimental.tensorrt.Converter",
        "text": "use the package tensorflow_text",
        "tfprof": "use tf.estimator.ProfilerHook, or the runner's run.profile",
        "timeseries": "use the package tensorflow_probability: tfp.sts",
        "tpu": "use tf.compat.v1.estimator.tpu, or tf.compat.v1.tpu for lower-level functions",
        "tpu.TPUDistributionStrategy tpu.keras_to_tpu_model tpu.shard": "use tf.distribute.TPUStrategy",
        "training.StopAfterNEvalsHook": "use Estimator.evaluate(steps=)",
        "training.SummaryAtEndHook": "Estimator.evaluate writes the summaries of eval_metric_ops",
        "training.bucket training.bucket_by_sequence_length": "use tf.data.experimental.bucket_by_sequence_length",
        "training.rejection_sample training.stratified_sample": "use tf.data.experimental.rejection_resample",
    }
)
"""Unsupported name -> what to use instead of it and of all names below it that are not in the table themselves."""

_PRIVATE_MODULES = frozenset(
    """
    python ops layers framework learn estimators estimator utils initializers regularizers feature_column
    feature_column_ops embedding_ops optimizers summaries normalization encoders core_rnn core_rnn_cell
    core_rnn_cell_impl rnn rnn_cell lstm_ops gru_ops fused_rnn_cell training hparam lookup lookup_ops head extenders
    replicate_model_fn early_stopping hooks tpu tpu_config tpu_estimator tpu_optimizer tpu_context crf decoder
    basic_decoder helper beam_search_decoder attention_wrapper loss seq2seq variables arg_scope checkpoint_ops
    metrics metric_ops data batching interleave_ops grouping shuffle_ops dataset_ops readers distribute
    mirrored_strategy cluster_resolver tpu_cluster_resolver opt weight_decay_optimizers lazy_adam_optimizer
    nadam_optimizer moving_average_optimizer lars_optimizer slim nets model_fn run_config predictor
    saved_model_predictor checkpoint_utils rnn_common counter enumerate_ops error_ops get_single_element
    prefetching_ops random_ops resampling scan_ops unique writers collective_all_reduce_strategy one_device_strategy
    multi_head sequence_feature_column tensor_util sort_ops loss_ops metric_loss_ops classification
    confusion_matrix_ops histogram_ops set_ops adamax beam_search_ops
    """.split()
)
"""Last parts of the names of the modules below `tensorflow.contrib.<part>.python`."""


def public(name: str) -> str:
    """Return the public name for a name below tf.contrib: `layers.python.layers.x` becomes `layers.x`, and a private
    module `layers.python.layers` becomes `layers`. Public names are returned unchanged.
    """
    part, _, rest = name.partition(".python")
    if not name.startswith(f"{part}.python") or (rest and not rest.startswith(".")):
        return name
    *folders, last = rest.strip(".").split(".")
    for folder in folders:
        module = f"{part}.{folder}"
        if module in MODULES or (module in NAMES and folder not in _PRIVATE_MODULES):
            part = module
    # Of `arg_scope`, `multi_head` and the like, a module and what it defines have one name.
    full_name = f"{part}.{last}"
    is_also_a_name = full_name in NAMES and folders[-1:] not in (["ops"], ["estimator"])
    is_module = last in _PRIVATE_MODULES and not is_also_a_name
    if not last or (is_module and full_name not in MODULES):
        return part
    return full_name


def find(name: str) -> str | None:
    """Return MODULE or "module:attribute" for a name below tf.contrib; None if it is not supported."""
    name = public(name)
    if name in MODULES:
        return MODULE
    if name.partition(".")[0] == "keras":  # today's tf.keras replaces it as a whole
        return f"tensorflow:{name}"
    return NAMES.get(name)


def instead_of(name: str) -> str:
    """Return what to use instead of an unsupported name."""
    part, _, last = name.rpartition(".")
    return text_of(GONE, name) or did_you_mean(last, within(NAMES, part)).strip() or "the runner does not have it"


def _reason(name: str, shown: str) -> str:
    instead = instead_of(public(name)).removesuffix(".")
    stop = "" if instead.endswith("?") else "."
    return f"{shown} is not available: {instead}{stop}"


MODULES = modules_of(NAMES)
"""The supported modules of tf.contrib, except keras."""

ROOT = "tensorflow.contrib"
SPACE = Space(find, _reason, lambda module: within(NAMES, public(module)), is_refused_late=True)
"""What is below `tensorflow.contrib`."""
