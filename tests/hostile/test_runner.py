#!/usr/bin/env python3
"""A minute of scripts/hostile with a fixed seed, and its judge, which must see what it is there to see."""
import importlib.machinery, importlib.util, io, os, signal, sys, time
from contextlib import redirect_stdout

HERE = os.path.dirname(os.path.realpath(__file__))
sys.dont_write_bytecode = True
sys.path[:0] = [os.path.join(HERE, '..', 'lib'), HERE]
loader = importlib.machinery.SourceFileLoader('hostile', os.path.join(HERE, '..', '..', 'scripts', 'hostile'))
hostile = importlib.util.module_from_spec(importlib.util.spec_from_loader('hostile', loader))
loader.exec_module(hostile)
import attack, runner  # noqa: E402
from cluster import BUILD, SCALE, TSAN, Skip, run  # noqa: E402

SEED = 1
SLACK = 6 * SCALE  # machines that run tests do other things


def played(*words):
    """Whether a run ends well, and what it prints."""
    if TSAN:  # the runner asks by bpsctl
        raise Skip('bpsctl is not run under the thread sanitizer')
    said = io.StringIO()
    with redirect_stdout(said):
        ok = hostile.main([f'--slack={SLACK}', *words]) == 0
    return ok, said.getvalue()


class Evil:
    """An attack that really does harm, to the first daemon, for the length of a with-block. It needs to be no trainer, but us."""

    def __init__(self, harm):
        self.harm, self.one = harm, attack.Attack(self.act, 'evil')

    def act(self, who):
        """Harm, once."""
        who.say('harm')
        if not who.state:
            who.state['done'] = True
            self.harm(who)
        time.sleep(0.01)

    def __enter__(self):
        self.one.name, self.become = 'evil', attack.become
        attack.ATTACKS['evil'], attack.become = self.one, lambda *_: None
        return self

    def __exit__(self, *_):
        del attack.ATTACKS['evil']
        attack.become = self.become


def daemon_of(who):
    """Its pid: it listens on the socket that trainers use."""
    import wire
    from socket import SOL_SOCKET, SO_PEERCRED
    session = wire.Session(who.target.sockets[0], hello=False)
    pid = int.from_bytes(session.socket.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)[:4], 'little')
    session.close()
    return pid


EVIL = ['--attack=evil', '--minutes=0.01', '--seed=1', '--seconds=1', '--quiet=0.5']


def test_a_seed_makes_the_same_schedule():
    names = sorted(attack.ATTACKS)
    assert runner.phases_of(7, 50, names) == runner.phases_of(7, 50, names) != runner.phases_of(8, 50, names)
    used = {name for one in runner.phases_of(1, 500, names) for name in one['attacks']}
    assert used == set(names), set(names) - used


def test_a_seed_makes_the_same_actions():
    def drawn(seed):
        who = attack.Attacker(None, seed, 0, None)
        return [who.wild(bits) for bits in (8, 16, 32, 64)] + [who.pick(*range(100)) for _ in range(20)]
    assert drawn(1) == drawn(1) != drawn(2)


def test_nothing_wrong_is_well():
    with Evil(lambda who: None):
        ok, said = played(*EVIL)
    assert ok, said


def test_a_daemon_that_stands_still_is_seen():
    def harm(who):
        pid = daemon_of(who)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(pid, signal.SIGCONT)
    with Evil(harm):
        ok, said = played(*EVIL, '--slack=1', '--seconds=3')
    assert not ok and 'a round of the measured job took' in said and '--phase 0' in said, said


def test_a_daemon_that_dies_is_seen():
    with Evil(lambda who: os.kill(daemon_of(who), signal.SIGKILL)):
        ok, said = played(*EVIL)
    assert not ok and 'has ended with -9' in said and 'harm' in said, said


def test_a_job_that_ends_is_seen():
    def harm(who):
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                with open(f'/proc/{pid}/cmdline') as file:
                    if who.target.folder + '/measured.0.tally' in file.read():
                        os.kill(int(pid), signal.SIGKILL)
            except FileNotFoundError:
                pass
    with Evil(harm):
        ok, said = played(*EVIL)
    assert not ok and 'measured.0: ended with -9' in said, said


def test_wrong_bits_are_seen():
    """Bytes that a daemon changes once it is well under way."""
    with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as file:
        if b'BPS_FAILPOINTS' not in file.read():
            raise Skip('needs -Dfailpoints=true')
    os.environ['BPS_FAILPOINTS'] = 'payload-received=corrupt@400'
    try:
        with Evil(lambda who: None):
            ok, said = played(*EVIL)
    finally:
        del os.environ['BPS_FAILPOINTS']
    assert not ok and 'wrong bits' in said, said


def test_descriptors_that_stay_are_seen():
    """A session that an attacker leaves to somebody who lives on."""
    import wire
    kept = []
    original = runner.Run.end

    def end(self, attackers, one):
        kept.extend(wire.Session(self.world.daemons[0].socket) for _ in range(10))
        return original(self, attackers, one)
    runner.Run.end = end
    try:
        with Evil(lambda who: None):
            ok, said = played(*EVIL)
    finally:
        runner.Run.end = original
        for session in kept:
            session.close()
    assert not ok and 'descriptors were not given back' in said, said


def test_a_broken_attack_is_seen():
    with Evil(lambda who: who.nothing):
        ok, said = played(*EVIL)
    assert not ok and 'the attack itself is broken' in said and 'AttributeError' in said, said


def test_a_minute():
    """Attackers of all kinds, by a schedule that is always the same."""
    ok, said = played(f'--seed={SEED}', '--minutes=1', '--seconds=2', '--quiet=0.7')
    print(said)
    assert ok, 'see above'


run(globals())
