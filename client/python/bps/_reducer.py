"""What reducers of gradients for TensorFlow and for Keras' other backends have in common: arguments, and local variables."""

from . import _client
from ._compression import NoneCompressor
from ._horovod import global_process_set, over_process_set_if_in_it
from ._library import Reduction
from ._ops import check_predivide


class Reducer:
    """How gradients are reduced. Called with gradients and their variables, it returns the reduced gradients.

    Those that are None stay None. A rank outside a process set reduces its own, by itself. A backend defines _reduce(),
    which takes a list of gradients and their numbers.
    """

    @over_process_set_if_in_it
    def __init__(
        self,
        compression=NoneCompressor,
        sparse_as_dense=False,
        op=Reduction.AVERAGE,
        gradient_predivide_factor=1.0,
        groups=None,
        process_set=global_process_set,
        scale_local_gradients=True,
    ):
        _client.remember(self)
        self.process_set = process_set
        self.op = Reduction(op)
        check_predivide(gradient_predivide_factor, self.op)
        if groups is not None and not isinstance(groups, (list, tuple)) and not int(groups) >= 0:
            raise ValueError("groups must be a number from 0, or a list of lists of variables")
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.predivide = gradient_predivide_factor
        self.groups = groups
        self.scale_local_gradients = scale_local_gradients
        self.local = set()  # what stands for variables whose gradients stay on their rank

    def register_local(self, variable):
        self.local.add(id(variable))

    @_client.as_remembered
    def __call__(self, gradients, variables):
        results = list(gradients)
        ours = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None:
                continue
            if id(variable) not in self.local:
                ours.append(i)
            elif self.scale_local_gradients:
                results[i] = gradient / _client.current().size
        for i, reduced in zip(ours, self._reduce([results[i] for i in ours], ours)):
            results[i] = reduced
        return results
