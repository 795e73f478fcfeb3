#!/usr/bin/env python3
"""etcd as the source of views: a real etcd-server and real daemons. Whatever of both dies, running jobs do not notice, and no
number of a view is ever that of two."""
import hashlib, os, re, signal, struct, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from etcd import *

if SANITIZED and 'thread' not in SANITIZER:
    sys.argv += sys.argv[1:] or ['one_etcd', 'everything', 'nonsense']  # the rest is the same code
if TSAN:
    print('skip all: gRPC is not built with the thread sanitizer\n0 passed, 0 failed, 1 skipped')
    sys.exit(77)
with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as binary:
    HAS_FAILPOINTS = b'BPS_FAILPOINTS' in binary.read()
LONG = 4 * DEADLINE


def cluster_of(etcd, n_nodes=2, n_spare=0, *options, lease='2s', kind=Cluster, **keys):
    return kind(n_nodes, n_spare, source='etcd',
                   options=['--etcd-endpoints=' + etcd.endpoints, '--lease=' + lease, *options], **keys)


class Lone(Cluster):
    """Its last node sums nothing: what it takes along when it dies are its own trainers."""

    def roles(self, i):
        return 'agent' if i == len(self.names) - 1 else 'agent,server'


def names(daemon):
    return sorted(node['name'] for node in daemon.ctl('nodes')['nodes'])


def settled(cluster, wanted=None, above=0):
    """All daemons that live have one view, of those wanted (all), with a number above that. Returns the number."""
    wanted = sorted(wanted or cluster.names)

    def look():
        alive = [daemon for daemon in cluster.daemons if daemon.alive() and daemon.name in wanted]
        epochs = {daemon.ctl('status')['epoch'] for daemon in alive}
        if len(epochs) == 1 and min(epochs) > above and all(names(daemon) == wanted for daemon in alive):
            return epochs.pop()
    return wait_for(f'a view of {wanted} above {above}', look, LONG)


def declare(ranks):
    for rank in ranks:
        rank.call('tensor', 0, 'sum', INT32, 1000)


def rounds(ranks, n, first=0, before=lambda turn: None):
    """n rounds of a sum, each checked; before(turn) runs while the first contribution waits for the others."""
    for turn in range(first, first + n):
        for k, rank in enumerate(ranks):
            rank.submit(turn, 0, struct.pack('<1000i', *[turn * 10 + k] * 1000), out=1000)
            if k == 0:
                before(turn)
        want = struct.pack('<1000i', *[sum(turn * 10 + k for k in range(len(ranks)))] * 1000)
        for rank in ranks:
            rank.wait(turn)
            assert rank.result(turn) == want, f'round {turn}'
            rank.call('free', turn)


def finish(ranks):
    for rank in ranks:
        rank.send('leave')
    for rank in ranks:
        rank.answer()
    for rank in ranks:
        rank.call('close')


def a_job_runs(cluster, layout=(1, 1), **keys):
    ranks = cluster.job(layout, **keys)
    declare(ranks)
    rounds(ranks, 2)
    finish(ranks)


def jobs(etcd):
    return [key for key in etcd.get('/bps/') if '/jobs/' in key or '/holds/' in key]


def claim_of(job):
    """Of a job of this user, without a secret."""
    owner = hashlib.sha256(b'bps-user' + job.encode() + b'\0' + os.getuid().to_bytes(4, 'little')).digest()[:8]
    return f'jobs/{job}/{int.from_bytes(owner, "little"):016x}'


def test_one_etcd():
    with Etcd() as etcd, cluster_of(etcd, 2, 1) as cluster:
        settled(cluster)
        ranks = cluster.job((2, 1), job='a.job-with_64.names')
        declare(ranks)
        rounds(ranks, 2)
        others = cluster.job((1, 1))
        declare(others)
        rounds(others, 1)
        assert '/bps/state/' + claim_of('a.job-with_64.names') in jobs(etcd) and len(jobs(etcd)) == 6, jobs(etcd)
        finish(ranks + others)
        wait_for('no job is claimed or held', lambda: not jobs(etcd), LONG)
        last = settled(cluster)
        cluster.daemons[2].stop()  # leaves in good order
        cluster.names.remove('s0')
        settled(cluster, above=last)


def test_a_job_waits_for_its_servers():
    with Etcd() as etcd, cluster_of(etcd, 2, 1, colocated=False, start=False) as cluster:
        cluster.daemons = [cluster.start(0), cluster.start(1)]
        ranks = cluster.job((1, 1), join=False, min_servers=1)
        for rank in ranks:
            rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
        late = cluster.trainer(0)
        try:
            late.call('join', 'job=late', 'world_size=2', 'rank=0', 'node=0', 'n_nodes=2', 'local_size=1', 'timeout_ms=300',
                      'min_servers=1')
            raise AssertionError('joined without a server')
        except BpsError as error:
            assert '1 server is wanted, 0 are there' in error.text, error.text
        cluster.daemons.append(cluster.start(2))
        for rank in ranks:
            rank.answer(LONG)
        declare(ranks)
        rounds(ranks, 1)
        finish(ranks)


def test_a_killed_daemon_is_seen_and_takes_its_place_again():
    with Etcd() as etcd, cluster_of(etcd, 3, kind=Lone) as cluster:
        first = settled(cluster)
        ranks = cluster.job((1, 1))
        declare(ranks)
        cluster.daemons[2].kill()
        began = time.monotonic()
        second = settled(cluster, ['n0', 'n1'], first)
        print(f'a killed daemon is out of the view after {time.monotonic() - began:.1f} s, with a lease of 2 s', flush=True)
        cluster.restart(2)
        third = settled(cluster, above=second)
        # Under its old one's lease, too.
        cluster.daemons[2].kill()
        cluster.restart(2)
        settled(cluster, above=third)
        rounds(ranks, 1)
        a_job_runs(cluster, (1, 1, 1))
        finish(ranks)


def test_a_stopped_daemon_is_dropped_and_comes_back():
    with Etcd() as etcd, cluster_of(etcd, 3, kind=Lone) as cluster:
        first = settled(cluster)
        ranks = cluster.job((1, 1))
        declare(ranks)
        cluster.daemons[2].signal(signal.SIGSTOP)
        second = settled(cluster, ['n0', 'n1'], first)
        etcd.compact()  # what it has not read yet
        cluster.daemons[2].signal(signal.SIGCONT)
        settled(cluster, above=second)
        rounds(ranks, 2)
        a_job_runs(cluster, (1, 1, 1))
        finish(ranks)


def test_a_watch_goes_on_after_a_compaction():
    with Etcd() as etcd, cluster_of(etcd, 2, 0, lease='60s') as cluster:
        first = settled(cluster)
        cluster.daemons[1].signal(signal.SIGSTOP)
        rdma, env = cluster.rdma(9)
        third = Daemon('late', cluster.folder, '--cluster=etcd', '--etcd-endpoints=' + etcd.endpoints,
                       '--address=' + cluster.address(9), '--lease=60s', *rdma, env=env)
        cluster.daemons.append(third)
        wait_for('a third', lambda: len(names(third)) == 3, LONG)
        etcd.compact()
        etcd.kill(0)  # so that all watches are made anew
        etcd.start(0)
        etcd.compact()
        cluster.daemons[1].signal(signal.SIGCONT)
        cluster.names.append('late')
        settled(cluster, above=first)
        a_job_runs(cluster)


def test_a_name_is_taken_from_the_dead_only():
    with Etcd() as etcd, cluster_of(etcd, 2, lease='15s') as cluster:
        first = settled(cluster)
        members = etcd.get('/bps/state/members/')
        folder = os.path.join(cluster.folder, 'impostor')
        os.mkdir(folder)
        impostor = Daemon('n1', folder, '--cluster=etcd', '--etcd-endpoints=' + etcd.endpoints,
                          '--address=' + cluster.address(8), '--lease=15s')
        try:
            wait_for('it is refused', lambda: 'node name n1 is taken by another daemon' in impostor.text(), LONG)
            a_job_runs(cluster)
            assert {k: v[0] for k, v in etcd.get('/bps/state/members/').items()} == {k: v[0] for k, v in members.items()}
            assert settled(cluster) == first, 'another view, for no reason'
            # When its owner is gone, it is its own.
            cluster.daemons[1].kill()
            wait_for('the name is free', lambda: names(impostor) == ['n0', 'n1'], LONG)
        finally:
            impostor.kill()


def test_etcd_dies_and_comes_back():
    with Etcd() as etcd, cluster_of(etcd) as cluster:
        first = settled(cluster)
        ranks = cluster.job((1, 1))
        declare(ranks)
        rounds(ranks, 2, 0, lambda turn: etcd.kill(0) if turn == 0 else None)
        wait_for('it is missed', lambda: all('lost, going on with view' in d.text() for d in cluster.daemons), LONG)
        late = cluster.job((1, 1), join=False, timeout_ms=1500)
        for rank in late:
            rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
        for rank in late:
            try:
                rank.answer()
                raise AssertionError('joined without etcd')
            except BpsError as error:
                assert 'etcd (' in error.text and 'has been gone for' in error.text, error.text
        waiting = cluster.job((1, 1), join=False)
        for rank in waiting:
            rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
        etcd.start(0)
        for rank in waiting:
            rank.answer(LONG)
        declare(waiting)
        rounds(waiting, 1)
        rounds(ranks, 1)
        assert settled(cluster) >= first
        finish(ranks + waiting)
        wait_for('no job is claimed or held', lambda: not jobs(etcd), LONG)


def test_etcd_loses_everything():
    with Etcd() as etcd, cluster_of(etcd, 3) as cluster:
        first = settled(cluster)
        ranks = cluster.job((1, 1))
        declare(ranks)
        before = etcd.get('/bps/state/')
        etcd.kill(0)
        etcd.start(0, fresh=True)
        second = settled(cluster, above=first)
        # The job is claimed as it was, and the key for data connections is the same.
        wait_for('the claim', lambda: '/bps/state/' + claim_of('job1') in etcd.get('/bps/state/'), LONG)
        after = etcd.get('/bps/state/')
        for key in ('/bps/state/' + claim_of('job1'), '/bps/state/key'):
            assert after[key][0] == before[key][0], key
        rounds(ranks, 2)
        a_job_runs(cluster, (1, 1, 1))
        # Now its number of views goes backwards under the daemons' eyes.
        etcd.put('/bps/state/view', before['/bps/state/view'][0])
        third = settled(cluster, above=second)
        assert third > second
        rounds(ranks, 1)
        finish(ranks)


def test_nonsense_in_etcd():
    with Etcd() as etcd:
        for key in ('key/x', 'members/n7', 'members/', 'jobs/', 'jobs/job2', claim_of('job2'), 'contest/n0', 'other', 'view/\x00'):
            etcd.put('/bps/state/' + key, b'\xff\x00nonsense')
        etcd.put('/bps/state/view', b'')
        with cluster_of(etcd) as cluster:
            first = settled(cluster)
            a_job_runs(cluster)
            a_job_runs(cluster)  # job2
            ranks = cluster.job((1, 1))
            declare(ranks)
            for key in ('view', claim_of('job3'), 'members/n1', 'contest/n1'):
                etcd.put('/bps/state/' + key, b'\x08' * 7)
            second = settled(cluster, above=first)
            etcd.remove('/bps/state/view')
            third = settled(cluster, above=second)
            etcd.remove('/bps/', '/bps0')
            settled(cluster, above=third)
            rounds(ranks, 1)
            a_job_runs(cluster)
            finish(ranks)


def test_one_of_three_is_killed():
    with Etcd(3) as etcd, cluster_of(etcd, 2, lease='15s') as cluster:
        first = settled(cluster)
        ranks = cluster.job((1, 1))
        declare(ranks)
        for i in range(3):
            rounds(ranks, 1, 3 * i, lambda turn: etcd.kill(i))
            rounds(ranks, 1, 3 * i + 1)
            a_job_runs(cluster)
            etcd.start(i)
        assert settled(cluster) == first, 'another view, for no reason'
        for daemon in cluster.daemons:
            assert 'lost, going on' not in daemon.text(), daemon.text()
        # Two of three: nothing can be written, and nothing that runs is hurt.
        etcd.kill(0)
        etcd.kill(2)
        rounds(ranks, 1, 20)
        wait_for('it is missed', lambda: all('lost, going on with view' in d.text() for d in cluster.daemons), LONG)
        rounds(ranks, 1, 21)
        etcd.start(0)
        settled(cluster)
        a_job_runs(cluster)
        finish(ranks)


def test_one_of_three_is_stopped():
    """No connection ends: what is asked of it is asked of another after a second."""
    with Etcd(3) as etcd, cluster_of(etcd, 2, 0, lease='5s') as cluster:
        settled(cluster)
        ranks = cluster.job((1, 1))
        declare(ranks)
        for i in range(3):
            etcd.signal(i, signal.SIGSTOP)
            rounds(ranks, 1, i)
            a_job_runs(cluster)
            etcd.signal(i, signal.SIGCONT)
            etcd.ready(i)
        settled(cluster)
        finish(ranks)


def test_with_tls():
    if not shutil.which('openssl'):
        raise Skip('no openssl(1) to make certificates with')
    folder = tempfile.mkdtemp(prefix='bps-tls-')
    try:
        subprocess.run(['sh', '-e', '-c', CERTIFICATES], cwd=folder, check=True, capture_output=True)
        tls = [f'--tls-{k}={folder}/{f}' for k, f in (('ca', 'ca.pem'), ('cert', 'a.pem'), ('key', 'a.key'))]
        with Etcd(hosts=[TLS_HOST], options=[f'--cert-file={folder}/a.pem', f'--key-file={folder}/a.key',
                  f'--trusted-ca-file={folder}/ca.pem', '--client-cert-auth']) as etcd, cluster_of(etcd, 2, 0, *tls) as cluster:
            settled(cluster)
            a_job_runs(cluster)
            plain = Daemon('plain', cluster.folder, '--cluster=etcd', '--etcd-endpoints=' + etcd.endpoints,
                           '--address=' + cluster.address(8), wait=False)
            cluster.trainers.append(plain)  # killed with them
            wait_for('it is told', lambda: 'not there yet' in plain.text(), LONG)
    finally:
        shutil.rmtree(folder)


TLS_HOST = f'127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.199'
CERTIFICATES = f'''openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=a -keyout a.key -out a.csr
printf 'subjectAltName=IP:{TLS_HOST}' >ext
openssl x509 -req -in a.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out a.pem'''


def test_daemons_die_at_each_failpoint():
    """A daemon dies wherever it is with what it writes; its next process goes on, and jobs are opened and forgotten."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    with Etcd() as etcd, cluster_of(etcd, 2) as cluster:
        last = settled(cluster)
        places = ['etcd-registered', 'etcd-view-written', 'etcd-claim-accepted', 'etcd-job-written']
        if os.environ.get('BPS_LONG'):
            places += ['etcd-leased', 'etcd-view-seen', 'etcd-synced', 'etcd-called', 'etcd-claim-seen']
        for place in places:
            cluster.daemons[0].kill()
            os.environ['BPS_FAILPOINTS'] = f'{place}=kill@{2 if place == "etcd-called" else 1}'
            cluster.restart(0, wait=False)
            del os.environ['BPS_FAILPOINTS']
            victim = cluster.daemons[0]
            if 'claim' in place or 'job' in place:
                # The home of a job is one or the other, by its name: the victim dies of one of these.
                for i in range(30):
                    if not victim.alive():
                        break
                    ranks = [cluster.trainer(node, open=False) for node in (0, 1)]
                    for node, rank in enumerate(ranks):
                        try:
                            rank.call('open', cluster.daemons[node].socket, 1000)
                            rank.send('join', f'job={place}{i}', f'rank={node}', 'world_size=2', f'node={node}', 'n_nodes=2',
                                      'local_size=1', 'timeout_ms=2000', 'min_servers=1')
                        except BpsError:
                            pass  # it is dead already
                    wait_for('it is dead, or has answered', lambda: not victim.alive() or any(
                        select.select([rank.process.stdout], [], [], 0)[0] for rank in ranks), LONG)
                    for rank in ranks:
                        rank.kill()
            elif place == 'etcd-view-written':
                cluster.daemons[1].kill()  # stays away, so that it is the one to write
            wait_for(f'{place} kills it', lambda: not victim.alive(), LONG)
            if not cluster.daemons[1].alive():
                cluster.restart(1)
            cluster.restart(0)
            last = settled(cluster, above=last)
            a_job_runs(cluster)
        wait_for('no job is claimed or held', lambda: not jobs(etcd), LONG)


def test_a_split_network_has_one_view_of_each_number():
    """Three machines, each with an etcd that only its own daemon asks. One is cut off and comes back; then another, with
    BPS_LONG."""
    prefix, network = netns(3)
    with network as net, Etcd(3, hosts=[f'10.88.0.{i + 1}' for i in range(3)], netns=lambda i: f'{prefix}{i}') as etcd, \
            Cluster(3, 0, source='etcd', netns=prefix, start=False, options=['--lease=4s']) as cluster:
        cluster.daemons = [cluster.start(i, False, [f'--etcd-endpoints={etcd.hosts[i]}:2379']) for i in range(3)]
        for daemon in cluster.daemons:
            daemon.ready()
        last = settled(cluster)
        seen = {}

        def look():
            for daemon in cluster.daemons:
                before, members = daemon.ctl('status')['epoch'], names(daemon)
                if daemon.ctl('status')['epoch'] == before:
                    seen.setdefault(before, set()).add(tuple(members))
            return {daemon.name: names(daemon) for daemon in cluster.daemons}
        for cut in (0, 1) if os.environ.get('BPS_LONG') else (0,):
            rest = [name for name in cluster.names if name != f'n{cut}']
            net('drop', cut)
            wait_for('the rest has a view', lambda: all(look()[name] == rest for name in rest), LONG)
            # Whoever is cut off has no view of its own, and no job is opened there.
            alone = cluster.trainer(cut)
            try:
                alone.call('join', f'job=alone{cut}', 'world_size=2', 'rank=0', 'node=0', 'n_nodes=2', 'local_size=1',
                           'timeout_ms=3000')
                raise AssertionError('a job was opened by who is cut off')
            except BpsError as error:
                assert 'etcd' in error.text, error.text
            assert look()[f'n{cut}'] == cluster.names
            order = [int(name[1:]) for name in rest]
            ranks = []
            for node, i in enumerate(order):
                rank = cluster.trainer(i)
                rank.keys = {'job': f'rest{cut}', 'rank': node, 'world_size': 2, 'node': node, 'local_rank': 0, 'local_size': 1,
                             'n_nodes': 2, 'timeout_ms': DEADLINE * 1000}
                ranks.append(rank)
            cluster.join(ranks)
            declare(ranks)
            rounds(ranks, 2)
            net('pass', cut)
            last = settled(cluster, above=last)
            look()
            rounds(ranks, 2, 2)
            finish(ranks)
        assert all(len(members) == 1 for members in seen.values()), seen
        assert len(seen) >= 3, seen


run(globals())
