"""scripts/chaos --elastic: ranks, nodes and daemons of one elastic job die, and others come. Each rank's log (tests/cluster/chaos_elastic.c)
says what it gave, what it got and who was in it; judge() makes every result again, from nothing but who was in it."""
import json, os, random, signal, subprocess, threading, time
from cluster import BUILD, DEADLINE, wait_for
import chaos_world
from chaos_world import Watch, longest_round

TENSORS = ('weights', 'bias', 'counts')
SLOTS = 1024
LOST_S, REQUEST_S = 3, 4  # until a daemon that is gone is lost, and until a rank that is late is dropped
FEWEST, MOST = 3, 6  # ranks: with fewer than FEWEST others are started before the next fault
KINDS = {'rank': 4, 'come': 3, 'node': 2, 'daemon': 3, 'server': 2, 'leave': 1, 'late': 1}
NODES, SERVERS = (0, 1, 2), (3, 4)


def schedule(seed, n, points):
    """n faults as dicts: what and how; whom is a number, to be taken modulo those that there are by then. points: failpoints of
    agents and of servers."""
    rng, faults = random.Random(seed), []
    for _ in range(n):
        kind = rng.choices([*KINDS], [*KINDS.values()])[0]
        fault = {'before': round(rng.uniform(0.05, 0.5), 3), 'kind': kind, 'whom': rng.randrange(1 << 16)}
        if kind in ('daemon', 'server'):
            fault['how'] = rng.choice(['kill', 'kill', 'term', 'stop', 'point', 'point'])
            if fault['how'] == 'point':
                fault['point'] = f'{rng.choice(points[kind])}=kill@{rng.choice((1, 1, 2, 3, 7))}' if points[kind] else ''
            elif fault['how'] == 'stop':
                fault['during'] = round(rng.uniform(0.1, 1.5), 3)
        elif kind == 'node':  # back soon, or after the others have gone on without it
            fault['away'] = round(rng.choice((rng.uniform(0, 0.5), LOST_S + rng.uniform(0.2, 1))), 3)
        elif kind == 'late':
            fault['during'] = round(rng.choice((rng.uniform(0.1, 1), REQUEST_S + 1)), 3)
        elif kind in ('rank', 'come'):
            fault['count'] = rng.choice((1, 1, 2))
        faults.append(fault)
    return faults


class Rank(chaos_world.Rank):
    """Of identity number `identity`, on a node. A place (rank, size, local rank, local size, nodes), or None for a newcomer."""

    def __init__(self, world, identity, node, place):
        self.identity, self.node, self.killed = identity, node, False
        path = os.path.join(world.folder, f'rank.{identity}')
        env = {'OMP_NUM_THREADS': '1', 'BPS_JOB': 'elastic', 'BPS_ELASTIC': '1', 'BPS_TIMEOUT': '10min',
               'BPS_REQUEST_TIMEOUT': f'{REQUEST_S}s', 'BPS_PART_BYTES': '64K', 'BPS_MIN_SERVERS': '2'}
        if place:
            env.update(zip(('BPS_RANK', 'BPS_SIZE', 'BPS_LOCAL_RANK', 'BPS_LOCAL_SIZE', 'BPS_NODES'), map(str, place)),
                       BPS_NODE=str(node))
        else:
            env['BPS_NEWCOMER'] = '1'
        argv = [os.path.join(BUILD, 'tests', 'cluster', 'chaos_elastic'), world.daemons[node].socket, str(identity), path, world.stop]
        super().__init__(path, f'rank.{identity}.err', argv, world.folder, None, env, stdin=subprocess.DEVNULL)

    def alive(self):
        return self.process.poll() is None and not self.killed

    def in_job(self):
        return self.alive() and any(line[0] == 'begin' for line in self.lines())


class World(chaos_world.World):
    """Three nodes that sum as well, and two that only sum."""

    layout = (2, 1, 2)

    def __init__(self):
        self.everybody = []
        super().__init__(len(NODES), len(SERVERS), options=[f'--lost-timeout={LOST_S}s', '--move-timeout=500ms'])
        self.stop = os.path.join(self.folder, 'stop')
        rank = 0
        for node, count in enumerate(self.layout):
            for local in range(count):
                self.add(node, (rank, sum(self.layout), local, count, len(self.layout)))
                rank += 1

    def add(self, node, place=None):
        rank = Rank(self, len(self.everybody), node, place)
        self.everybody.append(rank)
        self.trainers.append(rank)

    def live(self):
        return [rank for rank in self.everybody if rank.alive()]

    def members(self):
        return [rank for rank in self.everybody if rank.in_job()]


class Hang(Exception):
    pass


class Run:
    def __init__(self, seed, say, longest):
        self.watch = Watch(longest)
        self.rng, self.say = random.Random(seed), say  # of what the schedule does not say: where newcomers come
        self.n_faults = self.n_kills = 0
        self.counts = dict.fromkeys(KINDS, 0)
        self.errors = []

    def __enter__(self):
        self.world, self.over = World(), threading.Event()
        self.keeper = threading.Thread(target=self.guard)
        self.keeper.start()
        return self

    def __exit__(self, kind, *_):
        self.over.set()
        self.keeper.join()
        if os.environ.get('BPS_KEEP') or kind or self.errors:
            self.say(f'logs in {self.world.folder}')
            os.environ['BPS_KEEP'] = '1'
        self.world.abandon()

    def guard(self):
        try:
            self.world.keep(self.over)
        except Exception as error:
            self.errors.append(f'{error!r}')

    def until(self, what, condition):
        """Waits for as long as every rank gets on."""
        while not condition():
            bad = [rank for rank in self.world.everybody if not rank.killed and rank.process.poll()]
            standing = self.watch.standing(self.world.live())
            self.errors += [f'rank {rank.identity} on node {rank.node} ended: {rank.text().strip()[-300:]}' for rank in bad]
            self.errors += [f'rank {rank.identity} on node {rank.node} hangs for {self.watch.longest} s, while it is waited until {what}; '
                            f'its last words: {" ".join((rank.lines() or [["none"]])[-1][:3])}' for rank in standing]
            if self.errors:
                raise Hang
            time.sleep(0.02)

    def sleep(self, seconds):
        end = time.monotonic() + seconds
        self.until('the next fault', lambda: time.monotonic() > end)

    def settle(self):
        """All who live are in the job, and have done some rounds since: it has got over the fault before."""
        self.until('all are in', lambda: self.world.live() and all(rank.in_job() for rank in self.world.live()))
        rounds = {rank: len(rank.lines()) for rank in self.world.live()}
        self.until('all get on', lambda: all(len(rank.lines()) > n + 16 for rank, n in rounds.items() if rank.alive()))

    def train(self, faults, settled=False):
        try:
            self.until('the job begins', lambda: all(len(rank.lines()) > 9 for rank in self.world.everybody))
            for fault in faults:
                if settled:
                    self.settle()
                self.sleep(fault['before'])
                self.fill()
                self.strike(fault)
                self.n_faults += 1
            self.settle()
            open(self.world.stop, 'w').close()
            self.until('all end', lambda: not self.world.live())
        except Hang:
            pass

    # -- Faults

    def fill(self):
        """There are enough ranks in the job, on two nodes at least: what is killed then is never the last that knows the state."""
        def enough():
            return len(self.world.members()) >= FEWEST
        if enough():
            return
        self.until('somebody is in the job', self.world.members)
        nodes = sorted({rank.node for rank in self.world.members()} - self.world.away)
        while len(self.world.live()) < MOST - 1:
            self.come(self.rng.choice(nodes))
        self.until('newcomers are in', enough)

    def come(self, node):
        wait_for(f'daemon {node} is there', lambda: self.world.daemons[node].alive() or self.errors, 4 * DEADLINE)
        self.world.add(node)

    def strike(self, fault):
        self.counts[fault['kind']] += 1
        getattr(self, 'strike_' + fault['kind'])(fault, fault['whom'])

    def kill(self, rank, number=signal.SIGKILL):
        rank.killed = True
        rank.signal(number)
        self.n_kills += 1

    def victims(self, count=1):
        """Members that may be lost: two nodes keep some."""
        members = self.world.members()
        for rank in members:
            rest = [other for other in members if other is not rank]
            if len(rest) > count and len({other.node for other in rest}) > 1:
                yield rank

    def strike_rank(self, fault, whom):
        for k in range(fault['count']):
            victims = [*self.victims()]
            if victims:
                self.kill(victims[(whom + k) % len(victims)])

    def strike_leave(self, fault, whom):
        victims = [*self.victims()]
        if victims:
            rank = victims[whom % len(victims)]
            rank.signal(signal.SIGUSR1)
            self.until(f'rank {rank.identity} leaves', lambda: not rank.alive())

    def strike_come(self, fault, whom):
        nodes = sorted({rank.node for rank in self.world.members()} - self.world.away)
        for k in range(fault['count']):
            if len(self.world.live()) < MOST:
                self.come(nodes[(whom + k) % len(nodes)])

    def strike_late(self, fault, whom):
        victims = [*self.victims()]
        if not victims:
            return
        rank = victims[whom % len(victims)]
        rank.signal(signal.SIGSTOP)
        time.sleep(fault['during'])
        rank.signal(signal.SIGCONT)

    def strike_node(self, fault, whom):
        """Daemon and ranks at once: nobody says goodbye."""
        members = self.world.members()
        nodes = sorted(node for node in {rank.node for rank in members}
                       if len({rank.node for rank in members} - {node}) > 1 or len({rank.node for rank in members}) > 2)
        if not nodes:
            return
        node = nodes[whom % len(nodes)]
        with self.world.lock:
            self.world.away.add(node)
            self.world.daemons[node].signal(signal.SIGKILL)
            for rank in self.world.live():
                if rank.node == node:
                    self.kill(rank)
        self.world.daemons[node].process.wait()
        self.n_kills += 1
        time.sleep(fault['away'])
        self.world.away.discard(node)

    def strike_daemon(self, fault, whom):
        nodes = sorted({rank.node for rank in self.world.members()})
        self.hit(nodes[whom % len(nodes)], fault)

    def strike_server(self, fault, whom):
        self.hit(SERVERS[whom % len(SERVERS)], fault)

    def hit(self, i, fault):
        world = self.world
        wait_for(f'daemon {i} is there', lambda: world.daemons[i].alive() or self.errors, 4 * DEADLINE)
        n_deaths = len(world.deaths)
        with world.lock:
            if fault['how'] == 'point' and fault['point']:
                world.arm(i, fault['point'])
            daemon = world.daemons[i]
            daemon.signal({'term': signal.SIGTERM, 'stop': signal.SIGSTOP}.get(fault['how'], signal.SIGKILL))
        if fault['how'] == 'stop':
            time.sleep(fault['during'])
            daemon.signal(signal.SIGCONT)
        else:
            self.n_kills += 1
            wait_for(f'daemon {i} is dead', lambda: len(world.deaths) > n_deaths or self.errors, 4 * DEADLINE)

    def logs(self):
        return {rank.identity: rank.lines() for rank in self.world.everybody}


# -- The judge


class Judge:
    """Complaints are in wrong (what ranks say of rounds and of each other) and differing (values)."""

    def __init__(self, logs):
        self.wrong, self.differing = [], []
        self.places = {}  # (run, identity): (rank, node)
        self.began = {}  # run: its first round
        self.results = {}  # (run, round, tensor): {identity: the line's words after the tensor}
        self.failed, self.done = {}, {}  # (run, round): identities
        self.dropped = self.left = 0
        for identity, lines in logs.items():
            self.read(identity, lines)
        self.rounds = 0

    def complain(self, identity, words):
        self.wrong.append(f'rank {identity}: {words}')

    def read(self, identity, lines):
        """One rank's log by itself: nothing lost, nothing twice, all in order."""
        run = at = None
        pending = []
        for words in lines:
            kind = words[0]
            if kind == 'begin':
                if run is not None and (int(words[1]) <= run or int(words[2]) != at):
                    self.complain(identity, f'run {words[1]} begins with round {words[2]}, after run {run} and round {at}')
                run, at, pending = int(words[1]), int(words[2]), []
                self.places[run, identity] = int(words[3]), int(words[5])
                if self.began.setdefault(run, at) != at:
                    self.complain(identity, f'run {run} begins with round {at}, for others with {self.began[run]}')
            elif kind == 'result':
                key = run, int(words[1]), words[2]
                if key[1] != at or words[2] in pending:
                    self.complain(identity, f'{words[2]} of round {words[1]}, after {pending} of round {at}')
                pending.append(words[2])
                self.results.setdefault(key, {})[identity] = words[3:]
            elif kind == 'done':
                if int(words[1]) != at or sorted(pending) != sorted(TENSORS):
                    self.complain(identity, f'round {words[1]} is done with {pending} of round {at}')
                self.done.setdefault((run, at), set()).add(identity)
                at, pending = at + 1, []
            elif kind == 'failed':
                if run is not None:
                    self.failed.setdefault((run, at), set()).add(identity)
                pending = []
            self.dropped += kind == 'dropped'
            self.left += kind == 'left'

    def judge(self):
        """All logs together."""
        from chaos_values import Reference, digest
        self.digest, reference, at = digest, Reference(SLOTS), 0
        for key in self.done.keys() & self.failed.keys():
            self.wrong.append(f'round {key[1]} of run {key[0]} is done for {self.done[key]}, and failed for {self.failed[key]}')
        for run in sorted(self.began):
            if self.began[run] != at:
                self.wrong.append(f'run {run} begins with round {self.began[run]}, and {at} rounds are done')
                return self
            while any((run, at, tensor) in self.results for tensor in TENSORS):
                values = [self.agree(run, at, t, reference) for t in range(len(TENSORS))]
                if (run, at) not in self.done:
                    break
                if any(value is None for value in values):
                    return self
                reference.state, at = values, at + 1
        self.rounds = at
        if not at:
            self.wrong.append('no round is done')
        return self

    def agree(self, run, round_number, t, reference):
        """One result: all ranks say the same of it, and it is the reduction over those that are in it."""
        name, said = f'{TENSORS[t]} of round {round_number} of run {run}', self.results.get((run, round_number, TENSORS[t]), {})
        if not said:
            return None
        values = {words[0] for words in said.values()}
        if len(values) > 1:
            self.differing.append(f'{name} has {len(values)} values')
        # WHO, MEMBERSHIP, SIZE, CAME; a request that ended before a restart says nothing of them but WHO.
        outcomes = {(w[1], *((w[2], w[3], w[5]) if int(w[5]) else ())) for w in said.values()}
        whos = {outcome[0] for outcome in outcomes}
        if len(whos) > 1 or len({o for o in outcomes if len(o) > 1}) > 1:
            self.wrong.append(f'{name} is told to be {sorted(outcomes)}')
        who = [int(word) for word in sorted(whos)[0].split(',')]
        unknown = [identity for identity in who if (run, identity) not in self.places]
        if unknown or not set(said) <= set(who):
            self.wrong.append(f'{name} is from {who}: {unknown} had not begun; {sorted(set(said) - set(who))} got it')
            return None
        for outcome in outcomes:
            if len(outcome) > 1 and int(outcome[3]) != len(who) or len(outcome) > 1 and int(outcome[2]) > len(who):
                self.wrong.append(f'{name} is from {who}, and says size {outcome[2]}, {outcome[3]} came')
        by_rank = sorted(who, key=lambda identity: self.places[run, identity][0])
        for identity, words in said.items():
            if int(words[5]) and int(words[3]) == len(who) and int(words[4]) != by_rank.index(identity):
                self.complain(identity, f'is rank {words[4]} in {name}, of {by_rank}')
        nodes = {}
        for identity in by_rank:
            nodes.setdefault(self.places[run, identity][1], []).append(identity)
        value = reference.result(round_number, t, [nodes[node] for node in sorted(nodes)])
        if self.digest(value) not in values:
            self.differing.append(f'{name} is not the reduction over {nodes}')
        return value


def main(args, points):
    """Returns the exit status."""
    faults = schedule(args.seed, args.kills, points)
    print(f'seed {args.seed}: scripts/chaos --elastic --seed {args.seed} --kills {args.kills}'
          f'{" --settled" if args.settled else ""}{" --without-failpoints" if args.without_failpoints else ""}', flush=True)
    if args.print:
        for fault in faults:
            print(json.dumps(fault))
        return 0
    began = time.monotonic()
    with Run(args.seed, lambda text: print(text, flush=True), args.longest) as run:
        run.train(faults, args.settled)
        logs = run.logs()
        trained = time.monotonic() - began
        found = Judge(logs).judge()
        longest = max((longest_round([int(line[-1]) for line in lines if line[0] == 'result']) for lines in logs.values()), default=0)
        if longest > args.longest:
            run.errors.append(f'a round took {longest:.0f} s')
        unmet = run.world.unmet()
        run.errors += [] if not (found.wrong or found.differing) else ['see the logs']
    table = {
        'seed': args.seed, 'faults': run.n_faults, **{f'of them {kind}': n for kind, n in run.counts.items()},
        'kills': run.n_kills, 'processes of ranks': len(logs), 'runs': len(found.began), 'rounds': found.rounds,
        'rounds done again': len(found.failed), 'ranks dropped': found.dropped, 'ranks that left': found.left,
        'differing results': len(found.differing), 'lost or double rounds': len(found.wrong),
        'hangs and bad ends': len(run.errors), 'seconds': round(trained), 'longest round, s': round(longest, 1),
        'failpoints armed': len(run.world.points), 'of them not met': len(unmet),
    }
    for name, value in table.items():
        print(f'{name:32}{value}')
    for text in unmet:
        print('not met:', text)
    for text in [*found.differing[:10], *found.wrong[:10], *run.errors]:
        print('!!', text)
    table['not met'] = unmet
    table['ok'] = not (found.differing or found.wrong or run.errors)
    if args.json:
        with open(args.json, 'w') as file:
            json.dump(table, file, indent=1)
            file.write('\n')
    return 0 if table['ok'] else 1
