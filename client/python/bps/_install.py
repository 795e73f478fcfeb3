"""What is said to who lacks a part of bps that is no Python."""

WAY_OUT = (
    "Install a wheel of bps that carries it (in the source tree: scripts/deps build && pip install ./client/python), "
    "or Debian's packages (scripts/package && apt-get install ./build/packages/*.deb)"
)
