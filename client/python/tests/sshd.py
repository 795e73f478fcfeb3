"""An sshd of our own: its configuration, keys and processes are the test's and go with it."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)


class Sshd:
    """Listens on addresses, each a machine. netns: the network namespace to run in, where the port must be given."""

    def __init__(self, folder, addresses, port=0, netns=None):
        self.folder = pathlib.Path(folder)
        self.netns = ["ip", "netns", "exec", netns] if netns else []
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        os.makedirs("/run/sshd", exist_ok=True) if os.geteuid() == 0 else None  # where it gives up its privileges
        self.port = port or free_port()
        self._configure(addresses)
        if not self._start():
            raise AssertionError(f"sshd does not start: {self._log()}")

    def _configure(self, addresses):
        lines = [f"Port {self.port}", *(f"ListenAddress {address}" for address in addresses)]
        lines += [f"HostKey {self.folder}/host", f"AuthorizedKeysFile {self.folder}/user.pub", "PidFile none", "UsePAM no"]
        lines += ["StrictModes no", "PasswordAuthentication no", "KbdInteractiveAuthentication no", "MaxStartups 100"]
        lines += [f"SetEnv TMPDIR={tempfile.gettempdir()}"]  # or what is killed leaves its folder elsewhere
        self._write("sshd.conf", *lines)
        public = " ".join((self.folder / "host.pub").read_text().split()[:2])
        self._write("known", *(f"[{address}]:{self.port} {public}" for address in addresses))
        self._write(
            "ssh.conf",
            "Host *",
            f"UserKnownHostsFile {self.folder}/known",
            "GlobalKnownHostsFile /dev/null",
            "StrictHostKeyChecking yes",
            "IdentitiesOnly yes",
        )
        self.n_addresses = len(addresses)

    def _start(self):
        (self.folder / "log").write_text("")
        command = [*self.netns, SSHD, "-D", "-f", self.folder / "sshd.conf", "-E", self.folder / "log"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while self.process.poll() is None and time.monotonic() < deadline:
            if self._log().count("Server listening") == self.n_addresses:
                return True
            if "Bind to port" in self._log():
                break
            time.sleep(0.01)  # it tells nobody but its log
        self.process.kill()
        self.process.wait()
        return False

    def _write(self, name, *lines):
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def _log(self):
        return (self.folder / "log").read_text()

    @property
    def options(self):
        """Of bpslaunch."""
        return ["--ssh", f"ssh -F {self.folder}/ssh.conf", "-p", str(self.port), "-i", str(self.folder / "user")]

    def sessions(self):
        """Process numbers of its sessions."""
        return children(self.process.pid)

    def close(self):
        for pid in self.sessions():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.kill()
        self.process.wait()


_reserved = []


def free_port():
    """A TCP port that the kernel gives to no other program while this process lives.

    A socket stays bound to it. Who names the port and sets SO_REUSEADDR can listen there all the same.
    """
    _reserved.append(socket.socket())
    _reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved[-1].bind(("", 0))
    return _reserved[-1].getsockname()[1]


def children(pid):
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
