/*
 * Which jobs end before memory runs out. Rounds that wait for ranks that are behind hold the contributions of the others,
 * and a node that reads no further would wait for one that cannot be read: so jobs end, and those of who has the most.
 * Control thread only.
 */
#pragma once

struct peer;
struct server;

/*
 * A contribution, or a result that a node kept, has come from this peer. Where three quarters are in use of what may be held for
 * the peer, or for all jobs together, jobs of the user that has most of it end (EDQUOT) until half of that is free. Others' jobs go
 * on: over its quota the peer would be lost with all of its jobs, and with no memory left the next job to contribute would end.
 */
void relief_for(struct server *server, const struct peer *peer);
