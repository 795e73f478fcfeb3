/*
 * Frames over AF_UNIX SOCK_SEQPACKET: one packet is one protobuf message of control.proto, with up to FRAME_FDS file
 * descriptors beside it. The only sendmsg/recvmsg with SCM_RIGHTS of the project. No state: the kernel keeps the
 * packets apart. Any thread, one at a time per direction and socket.
 */
#pragma once

#include "proto/c.h"

#define FRAME_MAX (64u << 10) /* bytes of a packet */
#define FRAME_FDS 4	      /* descriptors beside it */

enum { FRAME_E_NONE, FRAME_E_AGAIN, FRAME_E_EOF, FRAME_E_FDS };

/*
 * Sends one packet, never blocking unless the socket does. The descriptors stay the caller's. Returns 0,
 * FRAME_E_AGAIN when the socket buffer is full, FRAME_E_EOF when the other side is gone, or -errno.
 */
int frame_send(int socket, const void *data, size_t len, const int *fds, size_t n_fds);

/*
 * Receives one packet into data (at least FRAME_MAX bytes of room) and its descriptors, all CLOEXEC, into fds
 * (FRAME_FDS of room); those belong to the caller. Returns 0 and sets *ret_len and *ret_n_fds; FRAME_E_AGAIN;
 * FRAME_E_EOF; -EPROTO for a truncated packet or too many descriptors (what came with it is closed); or -errno.
 */
int frame_receive(int socket, void *data, size_t *ret_len, int fds[FRAME_FDS], size_t *ret_n_fds);

/*
 * The same for one packet without descriptors, whatever the sender did; never blocks. FRAME_E_FDS: there are some beside it:
 * it is in data, but stays in the socket, and so do they: none of them is opened or closed here, which might take as long as
 * the sender likes.
 */
int frame_receive_bare(int socket, void *data, size_t *ret_len);
/* Whether a packet or the end is to be received; takes nothing out, never blocks. */
bool frame_is_there(int socket);
/* Ends the connection and takes out all that is left in it. Returns false where descriptors are: they stay. Never blocks. */
bool frame_end_bare(int socket);
