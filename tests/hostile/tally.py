"""Ranks of rank.c, and what they tell: see tally.h. Rank.phase is theirs to read, so all counts are taken by phase."""
import mmap, os, struct
from cluster import BUILD, Process, wait_for

LEN, HEAD = 512 + 16 * 4096, 512
WORKING, LEFT, FAILED = 1, 2, 3


class Rank(Process):
    def __init__(self, name, folder, socket, n_bytes, pause_us=0, nice=0, uid=0, gid=0, **join):
        path = os.path.join(folder, name + '.tally')
        with open(path, 'wb') as file:
            file.truncate(LEN)
        fd = os.open(path, os.O_RDWR)
        self.tally = mmap.mmap(fd, LEN)
        os.close(fd)
        os.chmod(path, 0o666)

        def become():  # in the child
            os.nice(nice)
            if uid:
                os.setgroups([])
                os.setresgid(gid, gid, gid)
                os.setresuid(uid, uid, uid)
        argv = [os.path.join(BUILD, 'tests', 'hostile', 'rank'), socket, path, str(n_bytes), str(pause_us),
                *(f'{key}={value}' for key, value in join.items())]
        super().__init__(name, argv, folder, preexec_fn=become)

    def _read(self, at, form='<I'):
        return struct.unpack_from(form, self.tally, at)

    def _write(self, at, value):
        struct.pack_into('<I', self.tally, at, value)

    @property
    def state(self):
        return self._read(12)[0]

    @property
    def rounds(self):
        return self._read(24, '<Q')[0]

    def failed(self):
        """Why it has, or None."""
        if self.state == FAILED:
            return f'{self.name}: ' + bytes(self.tally[32:512]).split(b'\0')[0].decode(errors='replace')
        if self.process.poll() is not None and self.state != LEFT:
            return f'{self.name}: ended with {self.process.returncode}'
        return None

    def enter(self, phase):
        self._write(0, phase)

    def pause(self, paused):
        self._write(4, int(paused))

    def stop(self):
        self._write(8, 1)

    def in_phase(self, phase):
        """Whether all rounds of earlier phases have ended."""
        return self._read(16)[0] == phase

    def of(self, phase):
        """(rounds, the longest in seconds) of a phase."""
        rounds, longest = self._read(HEAD + 16 * phase, '<QQ')
        return rounds, longest / 1e9


class Job:
    """Ranks that reduce again and again. sockets: of the daemon of each rank, in the order of ranks."""

    def __init__(self, name, folder, sockets, n_bytes=4096, size=None, **keys):
        self.name, self.ranks = name, []
        nodes = sorted(set(sockets), key=sockets.index)
        for rank, socket in enumerate(sockets):
            here = [i for i, other in enumerate(sockets) if other == socket]
            self.ranks.append(Rank(f'{name}.{rank}', folder, socket, n_bytes, job=name, rank=rank, size=size or len(sockets),
                                   node=nodes.index(socket), nodes=len(nodes), local_rank=here.index(rank), local_size=len(here),
                                   **keys))

    def ready(self):
        wait_for(f'job {self.name} works', lambda: self.failed() or all(rank.rounds for rank in self.ranks))
        assert not self.failed(), self.failed()
        return self

    def failed(self):
        return '; '.join(filter(None, (rank.failed() for rank in self.ranks))) or None

    def enter(self, phase):
        for rank in self.ranks:
            rank.enter(phase)

    def in_phase(self, phase):
        return all(rank.in_phase(phase) for rank in self.ranks)

    def pause(self, paused):
        for rank in self.ranks:
            rank.pause(paused)

    def of(self, phase):
        """(rounds, the longest) of a phase, of whichever rank says the worst."""
        said = [rank.of(phase) for rank in self.ranks]
        return min(rounds for rounds, _ in said), max(longest for _, longest in said)

    def rounds(self):
        return min(rank.rounds for rank in self.ranks)

    def kill(self):
        for rank in self.ranks:
            rank.kill()
