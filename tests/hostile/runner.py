"""Runs attacks beside honest jobs and judges what became of these (scripts/hostile). A run is a list of phases made of its
seed alone; each is played as

	quiet	the honest jobs by themselves
	fair	the measured one beside as many jobs that are greedy and legal as attackers will come
	attack	beside the attackers
	after	until what they held is given back
	busy	beside as many processes that only compute, and have nothing to do with the daemon

Its fair share is what it gets beside greedy jobs, but no more than one part of what it gets alone, of as many parts as there are
jobs and attackers, and no more than the machine itself leaves it when as many others compute.

In some of them the measured job's daemon is killed meanwhile, and started again.

What has to hold always is judged strictly: honest jobs work and have the right bits, daemons live and say nothing of
sanitizers, memory and descriptors come back. What depends on the machine is judged against the same run, with slack: the
share against `fair`, by rounds a second or by rounds for the daemon's processor time, whichever is better; the longest round against that of a yardstick, two processes that hand bytes to and fro at the same time.
"""
import collections, grp, json, os, random, re, resource, select, signal, statistics, subprocess, sys, time
import attack, operators, peers, strangers, trainers  # noqa: F401; they enter their attacks
from attack import ATTACKS
from cluster import SANITIZED, Cluster, wait_for
from tally import Job, Rank

MIB = 1 << 20
N_GREEDY = 4
LONGEST, SHARE, MEMORY = 0.25, 0.8, 64 * MIB
OPTIONS = ['--hello-timeout=2s', '--block-cache=16M', '--max-sessions=600', '--max-sessions-per-user=200', '--max-jobs=300',
           '--lost-timeout=10m']


def phases_of(seed, n, names, seconds=3.0, each=False):
    """What a seed makes. Each phase: the attack of each of its processes; how they end. each: every attack by itself, in turn."""
    rng, phases = random.Random(seed), []
    for number in range(len(names) if each else n):
        kinds = [names[number]] if each else [rng.choice(names) for _ in range(rng.choice((1, 1, 2, 3)))]
        rest = 1 if each else rng.randrange(N_GREEDY + 1 - len(kinds))
        phases.append({'number': number, 'seed': rng.getrandbits(48), 'seconds': seconds,
                       'attacks': kinds + [rng.choice(kinds) for _ in range(rest)],
                       'leave': rng.choice(('close', 'close', 'kill', 'stop')),
                       'restart': not each and rng.randrange(8) == 0})
    return phases


class World(Cluster):
    """Two nodes and a server, which is the coordinator, too; honest jobs on all of it, greedy ones on node 0."""

    SECRET = 'honest secret'

    def __init__(self, args):
        self.args, self.honest, self.greedy, self.yardstick, self.quorum = args, [], [], None, args.seed % 2
        super().__init__(2, 1, source='coordinator', start=False)
        try:
            self.prepare()
        except BaseException:
            self.abandon()
            raise

    def prepare(self):
        os.chmod(self.folder, 0o711)
        self.group = 65534
        key = os.path.join(self.folder, 'key')
        with open(key, 'w') as file:
            file.write('k' * 32)
        os.chmod(key, 0o600)
        self.options = [*OPTIONS, '--cluster-key-file=' + key]
        if os.geteuid() == 0:
            self.options.append('--group=' + grp.getgrgid(self.group).gr_name)
        self.daemons = [None] * 3
        for i in (2, 0, 1):
            self.daemons[i] = self.start(i, wait=False)
        for daemon in self.daemons:
            daemon.ready()
        here, there = self.daemons[0].socket, self.daemons[1].socket
        third = dict(quorum=1) if self.quorum else dict(elastic=1)
        self.honest = [Job('measured', self.folder, [here, here], secret=self.SECRET),
                       Job('wide', self.folder, [here, there], n_bytes=65536, pause_us=5000, secret=self.SECRET),
                       Job('elastic', self.folder, [here, there], pause_us=5000, secret=self.SECRET, **third)]
        self.greedy = [Job(f'greedy{i}', self.folder, [here, here], nice=self.args.nice) for i in range(N_GREEDY)]
        self.yardstick = Rank('yardstick', self.folder, '-', 4096, 1000)
        for job in [*self.honest, *self.greedy]:
            job.ready()
        for job in self.greedy:
            job.pause(True)

    def target(self):
        """What attackers know."""
        target = attack.Target([d.socket for d in self.daemons[:2]], [d.admin for d in self.daemons], self.addresses,
                               self.coordinator_address(), b'k' * 32, self.folder, [job.name for job in self.honest], self.group)
        target.closed = os.geteuid() == 0
        target.members = [(member['name'], int(member['id'], 16)) for member in self.daemons[0].ctl('nodes')['nodes']]
        target.numbers = [int(job['number']) for daemon in self.daemons for job in daemon.ctl('jobs').get('jobs', [])] \
            if self.args.numbers else []
        return target

    def coordinator_address(self):
        host, port = self.addresses[self.coordinated_by].rsplit(':', 1)
        return f'{host}:{int(port) + 1 if int(port) < 65535 else 1025}'

    def restart_node(self):
        """Kills the daemon of the measured job, and starts another in its place: whoever is in a job goes on, and nobody else."""
        self.daemons[0].signal(signal.SIGKILL)
        self.daemons[0].process.wait()
        self.restart(0)
        before = [job.rounds() for job in self.honest]
        wait_for('honest jobs go on after the restart', lambda: self.failed() or
                 all(job.rounds() > rounds + 1 for job, rounds in zip(self.honest, before)))

    def everybody(self):
        return [*self.honest, *self.greedy, self.yardstick]

    def failed(self):
        """What must not happen and has, all of it in one text; None."""
        said = [f'daemon {daemon.name} has ended with {daemon.process.returncode}' for daemon in self.daemons if not daemon.alive()]
        said += filter(None, (one.failed() for one in self.everybody()))
        return '; '.join(said) or None

    def sanitizers(self):
        """What they have said."""
        return [f'daemon {daemon.name}: {said[0]}' for daemon in self.daemons
                if (said := re.search(r'.*(ERROR: \w+Sanitizer|runtime error:|WARNING: ThreadSanitizer).*', daemon.text()))]

    def close(self):
        self.end_ranks()
        super().close()

    def abandon(self):
        self.end_ranks()
        super().abandon()

    def end_ranks(self):
        for one in [*self.honest, *self.greedy, *([self.yardstick] if self.yardstick else [])]:
            one.kill()


def of_living(read, nothing):
    """What read() finds in /proc; nothing of a daemon that has ended, which is told elsewhere."""
    try:
        return read()
    except FileNotFoundError:
        return nothing


def processor_of(daemon):
    """Seconds of processor time that it has used; none of one that has ended."""
    def read():
        with open(f'/proc/{daemon.pid}/stat') as file:
            return sum(map(int, file.read().rpartition(')')[2].split()[11:13])) / os.sysconf('SC_CLK_TCK')
    return of_living(read, 0)


def memory_of(daemon):
    """(private bytes, shared bytes) that are resident; of one that has ended nothing is."""
    with open(f'/proc/{daemon.pid}/status') as file:
        said = dict(re.findall(r'^(Rss\w+):\s+(\d+)', file.read(), re.M))
    return tuple(int(said.get(name, 0)) * 1024 for name in ('RssAnon', 'RssShmem'))


class Sample:
    """Of daemons: what they hold."""

    def __init__(self, world):
        self.logged = sum(os.path.getsize(d.log) for d in world.daemons)
        memory = [of_living(lambda d=d: memory_of(d), (0, 0)) for d in world.daemons]
        self.anon, self.shared = [each[0] for each in memory], [each[1] for each in memory]
        self.fds = [of_living(d.fds, 0) for d in world.daemons]

    def over(self, base):
        """(private bytes, shared bytes, descriptors) more than then, of whichever daemon has most of it."""
        return tuple(max(more) for more in self.more(base))

    def more(self, base):
        """The same of each."""
        return [[now - then for now, then in zip(mine, others)]
                for mine, others in ((self.anon, base.anon), (self.shared, base.shared), (self.fds, base.fds))]


class Growth:
    """What daemons have grown by since a Sample, beside what they charge for more than then. Each look takes some time of the
    processor, so there are two a second; none with sanitizers, which keep what is freed."""

    PERIOD, WINDOW = 0.5, 5

    def __init__(self, world, base):
        self.world, self.base = world, base
        self.at_base = None if SANITIZED else self.charged()
        self.charges, self.beyonds = [], []
        self.next = time.monotonic()

    def charged(self):
        """Bytes that each daemon says it holds for others; None when one does not answer."""
        try:
            return [int(daemon.ctl('status').get('bytes_held', 0)) for daemon in self.world.daemons]
        except (AssertionError, ValueError, OSError, subprocess.SubprocessError):
            return None

    def look(self):
        if time.monotonic() >= self.next:
            self.look_now()

    def look_now(self):
        """Memory first: what comes between the two is charged. What is given back is charged to nobody some time before it has gone:
        so the most of the last looks counts."""
        if not self.at_base:
            return
        grown, charged = Sample(self.world).more(self.base)[0], self.charged()
        if charged:
            self.charges.append([now - then for now, then in zip(charged, self.at_base)])
            most = map(max, zip(*self.charges[-self.WINDOW:]))
            self.beyonds.append([more - charge for more, charge in zip(grown, most)])
        self.next = time.monotonic() + self.PERIOD

    def most_charged(self):
        return max(map(max, self.charges), default=None)

    def beyond(self):
        """The most by which a daemon had grown more than it charged, at two looks on end: what was charged and given back between
        two looks may be seen at one. None: there were not two."""
        pairs = list(zip(self.beyonds, self.beyonds[1:]))
        return max([0, *(min(of_one) for before, now in pairs for of_one in zip(before, now))]) if pairs else None


class Run:
    def __init__(self, args):
        self.args, self.phase = args, 0
        self.world = World(args)

    # -- phases

    def enter(self):
        """A new phase of the tallies."""
        self.phase += 1
        for one in self.world.everybody():
            one.enter(self.phase)
        return self.phase

    def lasts(self, seconds, watch=None):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.world.failed():
            select.select([], [], [], min(0.1, max(0, end - time.monotonic())))
            if watch:
                watch()

    def timed(self, seconds, watch=None, begin=lambda: None, end=lambda: None):
        """A phase that lasts so long: rounds of the measured job a second, and a second of its daemon's processor time; the longest of it, of the other honest jobs, and of
        the yardstick, from before begin() to some time after end()."""
        phase, jobs = self.enter(), self.world.honest
        begin()
        began, rounds, used = time.monotonic(), jobs[0].rounds(), processor_of(self.world.daemons[0])
        self.lasts(seconds, watch)
        rounds = jobs[0].rounds() - rounds
        rate, per_cpu = rounds / (time.monotonic() - began), rounds / max(processor_of(self.world.daemons[0]) - used, 0.01)
        end()
        self.lasts(0.2)
        self.enter()  # rounds under way belong to the phase; the next is waited for
        wait_for('a round of each honest job after the phase', lambda: self.world.failed() or
                 all(job.in_phase(self.phase) for job in jobs) and self.world.yardstick.in_phase(self.phase), 60)
        return {'rate': rate, 'per cpu': per_cpu, 'longest': jobs[0].of(phase)[1], 'yardstick': self.world.yardstick.of(phase)[1],
                'others': max(job.of(phase)[1] for job in jobs[1:])}

    def beside_greedy(self, n, seconds, watch):
        for job in self.world.greedy[:n]:
            job.pause(False)
        try:
            return self.timed(seconds, watch)
        finally:
            for job in self.world.greedy[:n]:
                job.pause(True)

    def beside_busy(self, n, seconds, watch):
        """Beside processes that compute and no more: what the kernel's scheduler makes of the measured job then."""
        pids = [attack.compute(self.args.nice) for _ in range(n)]
        try:
            return self.timed(seconds, watch)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def play(self, one):
        """A phase of the schedule: a row of the table. What share the measured job has depends on what else the machine does: where
        it is too little, the median of three counts."""
        rows = [self.play_once(one)]
        while rows[0]['unfair'] and len(rows) < 3 and not self.world.failed():
            rows.append(self.play_once(one))
        row = sorted(rows, key=lambda row: row['fairness'])[len(rows) // 2]
        row['failed'] = [text for each in rows for text in each['failed']] + row['unfair']
        if row['failed']:
            self.tell(row, one)
        return row

    def play_once(self, one):
        args, names = self.args, one['attacks']
        row = {'phase': one['number'], 'attacks': sorted(set(names)) + ['restart'] * one['restart'], 'n': len(names),
               'leave': one['leave'], 'failed': [], 'unfair': []}
        growth = Growth(self.world, Sample(self.world))  # its looks take time in each phase
        quiet = self.timed(args.quiet, growth.look)
        fair = self.beside_greedy(len(names), args.quiet, growth.look)
        self.settle(None)
        base = Sample(self.world)
        held, attackers, broken = [], [], []
        growth = Growth(self.world, base)

        def watch():
            held.append(Sample(self.world).over(base))
            growth.look()

        def end():
            if one['restart']:
                self.world.restart_node()
                growth.charges.clear()  # of a process that is no more
                self.lasts(one['seconds'] / 2, watch)
            growth.look_now()
            self.lasts(Growth.PERIOD, growth.look)
            broken.extend(self.end(attackers, one))
        beside = self.timed(one['seconds'], watch, lambda: attackers.extend(self.start(one)), end)
        row['actions'] = self.actions(one)
        row.update(quiet=quiet, fair=fair, beside=beside)
        row['logged'] = Sample(self.world).logged - base.logged
        row['grown'] = [max(sample[i] for sample in held) for i in range(3)] if held else [0, 0, 0]
        row['charged'], row['beyond'] = growth.most_charged(), growth.beyond()
        row['kept'] = self.settle(base)
        row['kept by each'] = Sample(self.world).more(base)
        row['busy'] = self.beside_busy(len(names), args.quiet, growth.look)
        self.judge(row, broken, one)
        return row

    def trail(self, one):
        return os.path.join(self.world.folder, f'trail.{one["number"]}')

    def start(self, one):
        target, started = self.world.target(), []
        with open(self.trail(one), 'w'):
            os.chmod(self.trail(one), 0o666)
        for i, name in enumerate(one['attacks']):
            leave = 'close' if one['leave'] == 'close' else 'hold'
            started.append(attack.start(ATTACKS[name], target, one['seed'] + i, i, one['seconds'] * 0.9, self.args.nice,
                                        self.trail(one), leave))
        return started

    def end(self, attackers, one):
        """Ends attackers: 'close' is their own doing, else they are killed, or stopped for a while and then killed. What is broken."""
        broken = []
        if one['leave'] == 'stop':
            for pid in attackers:
                os.kill(pid, signal.SIGSTOP)
            self.lasts(0.3)
        end = time.monotonic() + (20 if one['leave'] == 'close' else 0)
        for i, pid in enumerate(attackers):
            status = 0
            while not status and time.monotonic() < end:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                select.select([], [], [], 0.02)
            else:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                broken.append(f'{one["attacks"][i]}: the attack itself is broken (exit {os.WEXITSTATUS(status)}), see its trail')
        return broken

    def actions(self, one):
        with open(self.trail(one), errors='replace') as file:
            return sum(1 for _ in file)

    def settle(self, base):
        """After the attackers: what is kept of memory and descriptors once it does not get less. base None: just waits for it to hold still."""
        seconds = 15 if base else 2
        end, over = time.monotonic() + seconds, None
        before = base or Sample(self.world)
        while time.monotonic() < end and not self.world.failed():
            now = Sample(self.world)
            over = now.over(before)
            if base and over[0] <= MEMORY and over[1] <= MEMORY and over[2] <= self.args.fds:
                break
            if not base and over[2] == 0:
                break
            if not base:
                before = now
            select.select([], [], [], 0.1)
        return over or (0, 0, 0)

    # -- judging

    def judge(self, row, broken, one):
        args, say = self.args, row['failed'].append
        for text in broken:
            say(text)
        for text in [self.world.failed(), *self.world.sanitizers()]:
            if text:
                say(text)
        one_of = [ATTACKS[name] for name in one['attacks']]
        beside, fair, quiet, busy = row['beside'], row['fair'], row['quiet'], row['busy']
        others = max(beside['yardstick'], quiet['longest'], fair['longest'])
        stalls, shares = (all(getattr(a, what) for a in one_of) and not one['restart'] for what in ('stalls', 'share'))
        if stalls and beside['longest'] > args.slack * (LONGEST + 3 * others):
            say(f'a round of the measured job took {beside["longest"] * 1000:.0f} ms; before {quiet["longest"] * 1000:.0f} ms alone and '
                f'{fair["longest"] * 1000:.0f} ms beside greedy ones; the yardstick {beside["yardstick"] * 1000:.0f} ms')
        fair_rate = max(min(fair['rate'], quiet['rate'] / (1 + row['n']), busy['rate']), 1e-9)
        row['share'] = beside['rate'] / fair_rate
        # What else the machine does takes rounds from the job, but not what the daemon does for it with the time that it has.
        row['part'] = beside['per cpu'] / max(quiet['per cpu'], 1e-9) * (1 + row['n'])
        row['fairness'] = max(row['share'], min(row['part'], 4 * row['share']))
        if shares and row['fairness'] * args.slack < SHARE:
            row['unfair'].append(f'the measured job did {beside["rate"]:.0f} rounds a second; {fair["rate"]:.0f} beside greedy ones, '
                                 f'{busy["rate"]:.0f} beside who computes, {quiet["rate"]:.0f} alone; and of what the daemon did '
                                 f'{row["part"]:.2f} of its fair part')
        if row['beyond'] is not None and row['beyond'] > args.slack * MEMORY:
            say(f'a daemon grew by {row["beyond"] / MIB:.0f} MiB more than it charges')
        if not SANITIZED and row['kept'][0] > MEMORY or row['kept'][1] > MEMORY:
            say(f'{row["kept"][0] / MIB:.0f} MiB of its own and {row["kept"][1] / MIB:.0f} shared were not given back; by each: ' +
                ', '.join(f'{daemon.name} {n / MIB:.0f}' for daemon, n in zip(self.world.daemons, row['kept by each'][0])))
        if row['kept'][2] > args.fds:
            say(f'{row["kept"][2]} descriptors were not given back')

    def tell(self, row, one):
        print(f'!! phase {one["number"]}, {" ".join(one["attacks"])}, {one["leave"]}:')
        for text in row['failed']:
            print('!!   ', text)
        print(f'!!    again: {again(self.args, one)}')
        with open(self.trail(one), errors='replace') as file:
            for line in collections.deque(file, self.args.trail):
                print('      ', line.rstrip()[:240])
        sys.stdout.flush()


def again(args, one):
    words = ['scripts/hostile', f'--seed {args.seed}', f'--minutes {args.minutes:g}', f'--seconds {args.seconds:g}',
             f'--quiet {args.quiet:g}', *(['--each'] if args.each else [])]
    if args.attack:
        words.append('--attack ' + ','.join(args.attack))
    return ' '.join([*words, f'--phase {one["number"]}'])


HEAD = f'{"attack":44}{"n":>3}{"actions":>9}{"longest":>9}{"alone":>7}{"share":>7}{"part":>7}{"grown":>8}{"charged":>9}{"beyond":>7}{"kept":>6}{"fds":>6}{"kept":>6}{"log KiB":>8}'


def line(row):
    def mib(n):
        return '-' if n is None else f'{n / MIB:.0f}'
    return (f'{"+".join(row["attacks"]):44.44}{row["n"]:>3}{row["actions"]:>9}{row["beside"]["longest"] * 1000:>9.1f}'
            f'{row["quiet"]["longest"] * 1000:>7.1f}{row["share"]:>7.2f}{row["part"]:>7.2f}{mib(row["grown"][0]):>8}{mib(row["charged"]):>9}'
            f'{mib(row["beyond"]):>7}{mib(row["kept"][0]):>6}{row["grown"][2]:>6}{row["kept"][2]:>6}{row["logged"] >> 10:>8}  {"FAILED" if row["failed"] else ""}')


def told(world):
    """What daemons have logged of the honest jobs."""
    names = '|'.join(job.name for job in world.honest)
    lines = [f'{daemon.name} {text}' for daemon in world.daemons for text in daemon.text().splitlines()
             if re.search(rf'\b(?:job )?(?:{names})\b|Sanitizer|runtime error|#\d+ 0x|^crash: |bps-daemon\(', text)]
    return '\n'.join('       ' + text[:240] for text in lines[-30:])


def play_all(args, phases, rows):
    """Plays phases; a world in which something has ended is followed by another. Returns whether all was well."""
    ok, one = True, None
    try:
        for phase in phases:
            one = one or Run(args)
            try:
                row = one.play(phase)
                print(line(row), flush=True)
                ok = ok and not row['failed']
            except AssertionError as error:
                print('!!', error, f'\n!!    again: {again(args, phase)}', flush=True)
                ok, row = False, None
            rows += [row] if row else []
            if not row or one.world.failed():
                print(told(one.world), flush=True)
                one.world.abandon()
                one = None
        if one:
            last, one = one, None
            ok = ended_well(last) and ok
    finally:
        if one:
            one.world.abandon()
    return ok


def ended_well(one):
    try:
        one.world.close()
        return True
    except AssertionError as error:
        print('!!', str(error)[:2000])
        return False


def run(args):
    """Plays a schedule. Returns whether all was well."""
    names = args.attack or attack.withstood()
    seconds = 3 * args.quiet + args.seconds + 1
    phases = phases_of(args.seed, max(1, round(args.minutes * 60 / seconds)), names, args.seconds, args.each)
    if args.phase is not None:
        phases = [phases[args.phase]]
    print(f'seed {args.seed}: {len(phases)} phases; milliseconds of the longest round of the measured job, MiB of the largest daemon')
    if args.print:
        for one in phases:
            print(json.dumps(one))
        return True
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # which daemons inherit
    print(HEAD, flush=True)
    rows = []
    try:
        ok = play_all(args, phases, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if args.json:
        with open(args.json, 'w') as file:
            json.dump({'seed': args.seed, 'attacks': names, 'rows': rows, 'ok': ok}, file, indent=1)
            file.write('\n')
    if rows:
        print(f'longest round {max(row["beside"]["longest"] for row in rows) * 1000:.0f} ms, least share '
              f'{min(row["share"] for row in rows):.2f} (median {statistics.median(row["share"] for row in rows):.2f}), '
              f'{sum(row["actions"] for row in rows)} actions: {"ok" if ok else "FAILED"}')
    return ok
