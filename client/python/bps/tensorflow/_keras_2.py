"""What DistributedOptimizer adds to optimizers of tf_keras, which is Keras 2: those of today and the legacy ones."""

import tensorflow as tf

from ._gradients import reference


class _Aggregation:
    """How far the gradients of one optimizer are: added up over passes, and reduced."""

    def __init__(self, passes, averages):
        self.passes = passes
        self.averages = averages
        self.computed = set()  # references to variables whose gradients compute_gradients() has reduced
        self.sums = {}  # by reference
        if passes > 1:
            with tf.init_scope():
                self.counter = tf.Variable(0, trainable=False, name="passes")  # since a reduction

    def _sum_of(self, gradient, variable):
        key = reference(variable)
        if key not in self.sums:
            with tf.init_scope():
                self.sums[key] = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
        return self.sums[key]

    def add(self, gradients, variables, reduce):
        """With the last pass reduce() of the sums, or of the averages; before what the sums are so far."""
        if self.passes == 1:
            return reduce(gradients, variables)
        sums = [None if g is None else self._sum_of(g, v) for g, v in zip(gradients, variables)]
        there = [i for i, each in enumerate(sums) if each is not None]
        for i in there:
            sums[i].assign_add(tf.convert_to_tensor(gradients[i]))
        self.counter.assign_add(1)

        def last_pass():
            added = [None if each is None else each.read_value() for each in sums]
            if self.averages:
                added = [None if each is None else each / self.passes for each in added]
            reduced = reduce(added, variables)
            self.counter.assign(0)
            for i in there:
                sums[i].assign(tf.zeros_like(sums[i]))
            return [reduced[i] for i in there]

        def other_pass():
            return [sums[i].read_value() for i in there]

        results = list(gradients)
        came = tf.cond(tf.equal(self.counter, self.passes), last_pass, other_pass)
        for i, result in zip(there, came):
            results[i] = result
        return results


class DistributedKeras2:
    """What is added to the class of an optimizer.

    Gradients are reduced where they are computed, by minimize() and fit(), or else where they are applied. A LossScaleOptimizer may
    be within or around: it sees what is reduced, so that an overflow on one rank skips the step on all.
    """

    def register_local_var(self, variable):
        """The gradient of variable stays on its rank; it is divided by the number of ranks (scale_local_gradients)."""
        self._bps.register_local(variable)

    def _bps_aggregation(self):
        """Of this very optimizer: copies have their own. Its name and its counter are Horovod's."""
        if "_agg_helper" not in vars(self):
            if self._bps_passes > 1 and vars(self).get("_is_wrapped_by_loss_scale_optimizer"):
                raise ValueError(
                    "backward_passes_per_step: the LossScaleOptimizer around the DistributedOptimizer may scale each pass otherwise; "
                    "give DistributedOptimizer the LossScaleOptimizer"
                )
            object.__setattr__(self, "_agg_helper", _Aggregation(self._bps_passes, self._bps_averages_passes))
        return self._agg_helper

    def _bps_reduced(self, pairs):
        gradients, variables = zip(*pairs) if pairs else ((), ())
        return list(zip(self._bps_aggregation().add(gradients, variables, self._bps), variables))

    def compute_gradients(self, loss, var_list, tape=None):
        """Pairs of gradient and variable, the gradients reduced over all ranks."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        base = super()
        if hasattr(base, "_compute_gradients"):  # a legacy one
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape)
        else:
            pairs = base.compute_gradients(loss, var_list, tape)
        self._bps_aggregation().computed.update(reference(v) for g, v in pairs if g is not None)
        return self._bps_reduced(pairs)

    def aggregate_gradients(self, grads_and_vars):
        """Pairs of gradient and variable, the gradients reduced over all ranks if compute_gradients() has not done it."""
        pairs = list(grads_and_vars)
        computed = self._bps_aggregation().computed
        are_reduced = any(reference(v) in computed for _, v in pairs)
        computed.difference_update(reference(v) for _, v in pairs)
        return pairs if are_reduced else self._bps_reduced(pairs)

    _aggregate_gradients = aggregate_gradients  # the legacy ones call it so

    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, experimental_aggregate_gradients=True
    ):
        """As the optimizer's own, of the gradients reduced over all ranks; with the last of several passes."""
        pairs = list(grads_and_vars)
        if experimental_aggregate_gradients and not skip_gradients_aggregation:
            pairs = self.aggregate_gradients(pairs)
        self._bps_aggregation().computed.difference_update(reference(v) for _, v in pairs)
        more = {"experimental_aggregate_gradients": False} | ({} if name is None else {"name": name})
        base = super()
        if self._bps_passes == 1:
            return base.apply_gradients(pairs, **more)
        with tf.init_scope():
            iterations = self.iterations

        def last_pass():
            base.apply_gradients(pairs, **more)
            return iterations.read_value()

        def other_pass():
            return iterations.assign_add(1, read_value=True)

        return tf.cond(tf.equal(self._bps_aggregation().counter, 0), last_pass, other_pass)
