"""What reducers for Keras' other backends have in common: the arguments of bps.tensorflow's, and local variables."""

from .. import _client
from .._horovod import global_process_set, over_process_set_if_in_it
from .._library import Reduction


class Reducer:
    """How gradients are reduced. Called with gradients and their variables, it returns the reduced gradients.

    Those that are None stay None. A rank outside a process set reduces its own, by itself. A backend defines _reduce(),
    which takes a list of gradients and their numbers.
    """

    @over_process_set_if_in_it
    def __init__(
        self,
        compression,
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
        if gradient_predivide_factor != 1.0 and self.op != Reduction.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=Average")
        self.compression = compression
        self.predivide = gradient_predivide_factor
        self.scale_local_gradients = scale_local_gradients
        self.local = set()  # ids of variables whose gradients stay on their rank

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
