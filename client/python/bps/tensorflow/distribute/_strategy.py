"""MirroredStrategy: each rank is one replica. TensorFlow's strategy for one device, with values reduced over ranks."""

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils, input_util
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.trackable.base import CheckpointInitialValueCallable

from ... import _client
from ..._library import Reduction
from .. import _native
from .._gradients import Reducer
from ..ops import allgather, allreduce, broadcast

_REDUCTIONS = {tf.distribute.ReduceOp.SUM: Reduction.SUM, tf.distribute.ReduceOp.MEAN: Reduction.AVERAGE}


def _local(value):
    """Of values by replica, as distributed data sets give them: the one of this rank."""
    return distribute_utils.select_replica(0, value)


class _Extended(OneDeviceExtended):
    def __init__(self, strategy, device):
        super().__init__(strategy, device)
        client = _client.current()
        self._rank, self._size = client.rank, client.size
        self._reducers = {op: Reducer(op=reduction) for op, reduction in _REDUCTIONS.items()}

    @property
    def _num_replicas_in_sync(self):
        return self._size

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return 0

    def _call_for_each_replica(self, fn, args, kwargs):
        with tf.device(self._device), _ReplicaContext(self._container_strategy(), self._rank):
            return fn(*_local(args), **_local(kwargs))

    def _local_results(self, value):
        return (_local(value),)

    # -- Variables begin as on rank 0

    def _create_variable(self, next_creator, **kwargs):
        initial = kwargs.get("initial_value")
        if initial is not None and not isinstance(initial, CheckpointInitialValueCallable):

            def of_rank_0():
                value = initial() if callable(initial) else initial
                value = tf.convert_to_tensor(value, kwargs.get("dtype"))
                return broadcast(value, 0) if value.dtype in _native.DTYPES else value

            kwargs["initial_value"] = of_rank_0
        return super()._create_variable(next_creator, **kwargs)

    # -- Values

    def _reduce_to(self, reduce_op, value, destinations, options):
        return tf.nest.map_structure(lambda v: allreduce(v, op=_REDUCTIONS[reduce_op]), _local(value))

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [_local(value) for value, _ in value_destination_pairs]
        return self._reducers[reduce_op](values, [None] * len(values))

    def _gather_to_implementation(self, value, destinations, axis, options):
        value = _local(value)
        if axis == 0:
            return allgather(value)
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        return tf.transpose(allgather(tf.transpose(value, order)), order)

    # -- Data: a batch is that of all ranks, of which each takes its share

    def _input_context(self):
        return distribute_lib.InputContext(self._size, self._rank, self._size)

    def _experimental_distribute_dataset(self, dataset, options):
        return input_util.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=self._size,
            input_context=self._input_context(),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn, options):
        return input_util.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [self._input_context()],
            self._container_strategy(),
            options=options,
        )

    def _experimental_distribute_values_from_function(self, value_fn):
        return value_fn(distribute_lib.ValueContext(self._rank, self._size))

    def _in_multi_worker_mode(self):
        return self._size > 1

    @property
    def should_checkpoint(self):
        return self._rank == 0

    @property
    def should_save_summary(self):
        return self._rank == 0


class _ReplicaContext(distribute_lib.ReplicaContext):
    def __init__(self, strategy, rank):
        super().__init__(strategy, replica_id_in_sync_group=rank)

    @property
    def devices(self):
        return self._strategy.extended.worker_devices


class MirroredStrategy(tf.distribute.Strategy):
    """A tf.distribute.Strategy in which each rank of the job is one replica. init() comes before.

    As with MultiWorkerMirroredStrategy variables begin alike (as on rank 0), a batch of a distributed data set is that
    of all ranks, num_replicas_in_sync is their number, and reduce() and the replica context's all_reduce() go over all
    of them. Statistics that no gradient reaches (metrics, of BatchNormalization) are each rank's own.

    devices: the one device that this rank uses; None: its first GPU, else the CPU. cross_device_ops is there for
    programs written for BytePS; values are always reduced by bps.
    """

    def __init__(self, devices=None, cross_device_ops=None):
        if devices is None:
            gpus = tf.config.list_logical_devices("GPU")
            devices = [gpus[_client.current().local_rank % len(gpus)].name if gpus else "/device:CPU:0"]
        devices = [devices] if isinstance(devices, str) else list(devices)
        if len(devices) != 1:
            raise ValueError(f"MirroredStrategy: {len(devices)} devices; start a rank for each, with one of them")
        super().__init__(_Extended(self, devices[0]))
