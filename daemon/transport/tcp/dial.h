/* Connections that are made: the lanes of a peer that is called. Home thread. */
#pragma once

#include "transport/peer/peer.h"

/* Starts to make the lanes of a peer; its address is resolved first unless that was done. Returns 0 or -ENOMEM. */
int dial_start(struct peer *peer, const struct addresses *addresses);
/* Makes one of its lanes anew, trying until the peer is lost. Returns 0 or -ENOMEM. */
int dial_again(struct peer *peer, unsigned lane);
struct dial *dial_free(struct dial *dial);
