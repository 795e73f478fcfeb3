"""What tests of elastic jobs over several nodes share: ranks that submit the same rounds while some of them are lost, and
what every one that is left must find."""
from recovery import *

QUICK = (f'--lost-timeout={500 * SLOW}ms', f'--move-timeout={200 * SLOW}ms')  # a server that lives answers sooner
N = 6 * PART // 4 + 12345  # several parts


class Group:
    """Ranks of an elastic job that submit the same rounds; some may be gone."""

    def __init__(self, cluster, layout, **keys):
        self.cluster, self.layout = cluster, layout
        self.ranks = job(cluster, layout, elastic=1, **keys)
        self.live, self.request = list(range(sum(layout))), 0
        self.nodes = [i for i, n in enumerate(layout) for _ in range(n)]  # of each rank
        self.numbers = {i: i for i in range(len(layout))}  # of nodes in the job: new ones come last

    def each(self, *words):
        return each([self.ranks[k] for k in self.live], *words)

    def node(self, k):
        return self.nodes[k]

    def layout_of(self, ranks):
        on = [sum(self.node(k) == node for k in ranks) for node in sorted(self.numbers, key=self.numbers.get)]
        return [n for n in on if n]

    def lose(self, *ranks):
        for k in ranks:
            self.ranks[k].kill()
            self.live.remove(k)

    def lose_node(self, i):
        """Daemon and trainers at once: nobody says goodbye."""
        self.cluster.daemons[i].kill()
        self.lose(*[k for k in self.live if self.node(k) == i])

    TENSORS = ((1, 'sum', FLOAT32, N), (2, 'mean', BFLOAT16, N), (3, 'few', INT32, 5), (4, 'from', UINT8, N),
               (5, 'pieces', INT32, -1))

    def tensors(self):
        for tensor in self.TENSORS:
            self.each('tensor', *tensor)

    def data(self, turn):
        size = len(self.ranks)
        return [[ref.random(dtype, n, (SEED, turn, i, k)) for k in range(size)]
                for i, (dtype, n) in enumerate([(FLOAT32, N), (BFLOAT16, N), (INT32, 5)])]

    def submit(self, turn, short=None):
        """A round of each; in place, so that nothing can be done again once an output was touched. short: {rank: how many
        of them it submits}."""
        data, first = self.data(turn), self.request
        self.request += 3
        for k in self.live:
            for i, reduction in list(enumerate((SUM, AVERAGE, SUM)))[:(short or {}).get(k)]:
                self.ranks[k].submit(first + i, 1 + i, data[i][k].tobytes(), op=PUSH_PULL, red=reduction,
                                     out=(N, N, 5)[i], inplace=1, shared=(turn + i) % 2)
        return first

    def finish(self, turn, first, before):
        """before: who was in the job when they were submitted. Returns who came to the last of them."""
        data, came = self.data(turn), None
        for i, (dtype, reduction) in enumerate([(FLOAT32, SUM), (BFLOAT16, AVERAGE), (INT32, SUM)]):
            self.each('wait', first + i, DEADLINE * 2000)
            outcomes = [word.split() for word in self.each('came', first + i)]
            assert all(o[:2] + o[3:] == outcomes[0][:2] + outcomes[0][3:] for o in outcomes), outcomes
            size, n_came = int(outcomes[0][1]), int(outcomes[0][3])
            assert size == n_came, outcomes
            came = before if n_came == len(before) else self.live
            assert n_came == len(came), (outcomes, before, self.live)
            assert [int(o[2]) for o in outcomes] == [came.index(k) for k in self.live], outcomes
            by_node = sorted(came, key=lambda k: (self.numbers[self.node(k)], k))
            want = ref.reduce(dtype, reduction, [data[i][k] for k in by_node], self.layout_of(came)).tobytes()
            for k in self.live:
                assert self.ranks[k].result(first + i) == want, f'turn {turn}, tensor {i} on rank {k} of {came}'
                self.ranks[k].call('free', first + i)
        return list(came)

    def turn(self, turn, then=None, short=None):
        before = list(self.live)
        first = self.submit(turn, short)
        if then:
            then()
        return self.finish(turn, first, before)


def refused(rank, *words, request=None, number=None):
    """A call, or the end of a request, that must fail: its error."""
    try:
        rank.call(*words, seconds=2 * DEADLINE) if request is None else rank.wait(request, DEADLINE * 2000)
    except BpsError as error:
        assert number is None or error.errno == number, error
        return error
    raise AssertionError('completed, but should have failed')


def newcomer(group, node, waits=True, share=0, **keys):
    """A trainer that asks to be let in; share: bytes that it shares before. waits: until its daemon has heard that it does. What
    else it says the job does not ask for."""
    daemon, rank = group.cluster.daemons[node], group.cluster.trainer(node)
    before = daemon.text().count('waits to be let in')
    rank.call('attend')
    if share:
        rank.call('share', share)
    rank.send('join', f'job={group.ranks[group.live[0]].keys["job"]}', 'elastic=1', 'newcomer=1',
              f'timeout_ms={DEADLINE * 2000}',
              *(f'{k}={v}' for k, v in keys.items()))
    if waits:
        wait_for('a newcomer waits', lambda: daemon.text().count('waits to be let in') > before)
    return rank


def guest(group, node, n=1):
    """The n-th newcomer of a node that has no rank in the job, of which the job's home has heard."""
    cluster, said = group.cluster, f'{n} newcomers wait on node {group.cluster.names[node]}\n'

    def count():
        return sum(daemon.text().count(said) for daemon in cluster.daemons)
    before, rank = count(), newcomer(group, node)
    wait_for('the home hears of a newcomer', lambda: count() > before)
    return rank


def regroup(group, newcomers=(), **keys):
    """newcomers: nodes; keys: what those of the job's nodes say. Ranks are those of the layout again: members in their order, then the newcomers, node by node, those
    that are new to the job last."""
    here = sorted({group.node(k) for k in group.live}, key=group.numbers.get)
    new = [node for i, node in enumerate(newcomers) if node not in here and node not in newcomers[:i]]
    joining = [guest(group, node, 1 + newcomers[:i].count(node)) if node in new else newcomer(group, node, **keys)
               for i, node in enumerate(newcomers)]
    group.each('regroup')
    for rank in joining:
        rank.answer(2 * DEADLINE)
    group.numbers = {node: i for i, node in enumerate(here + new)}
    on = [(group.ranks[k], group.node(k)) for k in group.live]
    on += sorted(zip(joining, newcomers), key=lambda pair: group.numbers[pair[1]])
    group.nodes = [node for _, node in on]
    group.ranks, group.live = [rank for rank, _ in on], list(range(len(on)))
    assert [int(w) for w in group.each('rank')] == group.live
    for rank in joining:
        for number, name, dtype, n in group.TENSORS:
            rank.send('tensor', number, name, dtype, n)
    for rank in joining:
        for _ in group.TENSORS:
            rank.answer(2 * DEADLINE)
