"""A job that always has as much under way as it can (tests/cluster/tenant.c), and what several such jobs have had of a daemon."""
import os, signal, subprocess, time
from cluster import BUILD, DEADLINE

TENANT = os.path.join(BUILD, 'tests', 'cluster', 'tenant')
GREEDY = 2 ** 31 - 1  # the largest priority there is


class Tenant:
    def __init__(self, cluster, job, layout, tensors, priority=0):
        """layout[k]: ranks on node k. tensors: pairs of how many, and bytes of each. Runs until it is stopped."""
        self.ranks, size = [], sum(layout)
        for node, local_size in enumerate(layout):
            for local_rank in range(local_size):
                env = {k: v for k, v in os.environ.items() if not k.startswith('BPS_')}
                env.update({'BPS_SOCKET': cluster.daemons[node].socket, 'BPS_JOB': job, 'BPS_TIMEOUT': '600'})
                for key, value in {'RANK': len(self.ranks), 'SIZE': size, 'LOCAL_RANK': local_rank, 'LOCAL_SIZE': local_size,
                                   'NODE': node, 'NODES': len(layout)}.items():
                    env['BPS_' + key] = str(value)
                argv = [TENANT, str(priority), *(str(word) for pair in tensors for word in pair)]
                if cluster.netns:
                    argv = ['ip', 'netns', 'exec', f'{cluster.netns}{node}', *argv]
                self.ranks.append(subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def ready(self):
        """Its tensors have been reduced once."""
        for rank in self.ranks:
            line = rank.stdout.readline()
            assert line == 'ready\n', f'a tenant ended: {line!r}'

    def ask(self):
        """Rounds and bytes since it was asked before, and the seconds of the longest round, of all ranks."""
        for rank in self.ranks:
            rank.stdin.write('?\n')
            rank.stdin.flush()
        answers = [[int(word) for word in rank.stdout.readline().split()] for rank in self.ranks]
        return answers[0][0], answers[0][1], max(answer[2] for answer in answers) / 1e6

    def signal(self, number):
        for rank in self.ranks:
            rank.send_signal(number)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


def together(tenants, seconds):
    """What each of these has in so many seconds in which they go on, of all that have been stopped: as Tenant.ask()."""
    for one in tenants:
        one.signal(signal.SIGCONT)
    for one in tenants:
        one.ask()
    time.sleep(seconds / 4)  # until queues are as they stay
    for one in tenants:
        one.ask()
    time.sleep(seconds)
    had = [one.ask() for one in tenants]
    for one in tenants:
        one.signal(signal.SIGSTOP)
    return had
