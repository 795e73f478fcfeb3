#!/usr/bin/env python3
"""bpslaunch: starts the ranks of a job, here or over ssh, and daemons for them if none are there. See bpslaunch(1)."""

import errno
import os
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
INSTALLED = bool(__package__)
if not INSTALLED:  # run as a file: its folder has modules called torch, torchcomms and so on, which is not the one that programs mean
    sys.path[0] = os.path.dirname(HERE)

from bps._launch import LaunchError, arguments, byteps, launcher  # noqa: E402


def main(given=None):
    given = sys.argv[1:] if given is None else given
    if given == ["--agent"]:  # how we are started on another machine
        from bps._launch import agent

        return agent.main()
    options = arguments.parse_arguments(given)
    options.launch_file = os.path.join(HERE, "launch.py")
    options.package_folder = None if INSTALLED else os.path.dirname(HERE)
    try:
        if options.byteps_service:
            return byteps.serve(options)
        return launcher.Launcher(options).run()
    except LaunchError as error:
        print(f"bpslaunch: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        return 128 + signal.SIGPIPE  # nobody reads our output any more; the ranks are ended by then


if __name__ == "__main__":
    sys.exit(main())
