/*
 * The data plane: what two daemons say to each other over a data connection (TCP, RDMA) and, without the connection,
 * in one process. Fixed size, little-endian, no protobuf in headers or bulk data; set-up messages (JOIN, ATTACH,
 * DECLARE and their answers) carry one message of cluster.proto as payload.
 *
 * A connection starts with a handshake: hello from the connecting side, hello from the accepting side, proof from the
 * connecting side (see data_hello). Then both sides send messages: a data_header and header.len bytes of payload.
 * The connecting side makes CALLS: each has a cookie that is not 0 and gets exactly one answer with the same cookie on
 * the same connection. Messages with cookie 0 are NOTICES and are not answered; both sides may send them.
 */
#pragma once

#include "proto/types.h"

#define DATA_MAGIC	 0x31535042u /* "BPS1" in the byte stream */
#define DATA_VERSION	 3
#define DATA_VERSION_MIN 3 /* oldest we can talk to; 2: a key proved nothing behind the handshake */

/* Feature bits of a hello; a sender uses a feature only if both sides have it. */
#define DATA_FEATURE_NONE 0ull
#define DATA_FEATURE_RDMA \
	1ull /* DATA_RDMA, the flags below, and what stands at the end of this file */
#define DATA_FEATURE_CHECKSUM 2ull  /* over TCP each message is sealed: DATA_TAG_LEN */
#define DATA_FEATURE_RAILS    4ull  /* DATA_LANE_BEAT, DATA_FLAG_AGAIN */
#define DATA_FEATURE_KEPT     8ull  /* DATA_FLAG_KEPT */
#define DATA_FEATURE_PACKS    16ull /* DATA_PACK, over TCP */
#define DATA_FEATURE_PROBE \
	32ull /* DATA_PROBE_MORE; the accepting side has it only if it wants one */
#define DATA_FEATURE_STOPPING 64ull  /* DATA_STOPPING, DATA_IDLE */
#define DATA_FEATURE_ORDINALS 128ull /* DATA_ORDINAL */
#define DATA_FEATURE_SCALES   256ull /* DATA_SCALE_SHIFT; used if all servers of a job have it */
#define DATA_FEATURE_FORGET \
	512ull /* DATA_FORGET, _KEEP, _UNUSED, _NAMED; used if all nodes and servers of a job have it */
#define DATA_FEATURE_FOLLOW  1024ull /* DATA_FOLLOW, _BEGUN, _OTHERS_FOLLOW, _OTHERS_BEGUN */
#define DATA_FEATURE_BLOCKED 2048ull /* DATA_BLOCKED */

/*
 * With DATA_FEATURE_PROBE, behind the connecting side's proof: pieces of DATA_PROBE_LEN bytes, DATA_PROBE_PIECES at most, which
 * begin with DATA_PROBE_MORE and mean nothing else, then the byte DATA_PROBE_LAST. When that has come the accepting side says
 * DATA_PROBE_LAST, too, and messages may follow. From when the pieces come it knows how fast its link is. Whoever connects stops
 * soon where links are slow.
 */
#define DATA_PROBE_MORE	  1u
#define DATA_PROBE_LAST	  2u
#define DATA_PROBE_LEN	  (16u << 10)
#define DATA_PROBE_PIECES 128u

/*
 * With DATA_FEATURE_RAILS a connection with another number than 0 may break, and be made anew, without loss of the peer; the
 * one with number 0 is made first. PUSHes on it whose answers had not come are made again, with DATA_FLAG_AGAIN; answers that
 * were not written are dropped. Number DATA_LANE_BEAT carries PING and PONG alone, and is answered by a thread that does nothing
 * else: so somebody who is busy is not taken for somebody who is dead.
 */
#define DATA_LANE_BEAT 255u

/*
 * With DATA_FEATURE_CHECKSUM, on a TCP connection, a seal stands behind each header, and behind each payload that is not empty: of
 * that header as it was sent, or of that payload. With a cluster key one side that has the feature is enough for both, and seals
 * are tags of DATA_TAG_LEN bytes: AES-128-GMAC. The key of what the connecting side sends is the first 16 bytes of
 * HMAC-SHA256(cluster key, "bps-tags-client" || the two hellos as in the proofs), that of the other direction has "bps-tags-server".
 * The nonce is four bytes of 0 and the number of the seal in its direction, from 0, little-endian. Without a key both sides must have
 * the feature, and seals are DATA_CHECK_LEN bytes: CRC-32C, little-endian, against accidents alone.
 *
 * What does not fit its seal is as if it had not come. After a header the connection is closed, since nobody knows what else is
 * wrong; a payload is asked for once more where both have DATA_FEATURE_RAILS.
 */
#define DATA_TAG_LEN   16u
#define DATA_CHECK_LEN 4u

#define DATA_PAYLOAD_MAX PART_BYTES_MAX
#define DATA_CONTRIBUTORS_MAX               \
	(sizeof(struct data_contributors) + \
	 JOB_RANKS_MAX * sizeof(uint64_t)) /* more: data_contributors */
#define DATA_SETUP_MAX (4u << 20)	   /* payload of a set-up message */

enum data_op {
	/* Calls, agent to server. */
	DATA_JOIN = 1,	  /* to the job's home server: JobJoin; DATA_OK brings JobJoined */
	DATA_ATTACH = 2,  /* to each server of the job: JobAttach; DATA_OK brings nothing */
	DATA_DECLARE = 3, /* to the home server: TensorDeclare; DATA_OK brings TensorDeclared */
	DATA_PUSH = 4,	  /* a node's contribution to a part of a round; DATA_RESULT answers */
	DATA_PULL = 5,	  /* a further piece of a result by rows; DATA_RESULT answers */
	DATA_OFFER =
		6, /* a part's result that not all nodes may have; DATA_OK answers once all do */
	/* Daemon to server: what it sums is to go elsewhere, as an operator wants it. DATA_OK: `block` jobs go, `part` stay. */
	DATA_DRAIN = 7,
	/*
	 * To the home server: no rank of this node uses key, whose operations are over here up to `round`, and none will before
	 * the answer. DATA_OK: so it is with all nodes, and the tensor is forgotten. ERROR, EBUSY: it is not.
	 */
	DATA_FORGET = 8,
	/* Answers, server to agent. */
	DATA_OK = 16,
	DATA_RESULT = 17, /* the part's result, fields as in PUSH; no payload if not needed there */
	/* status is a positive errno, payload a text up to ERROR_TEXT_MAX; EBADMSG: the call was damaged, and is to come again */
	DATA_ERROR = 18,
	/* Notices. */
	DATA_FAIL_ROUND = 32, /* agent to server: round of key fails; status and text say why */
	/*
	 * Either way: the job is over; status and text say why. To a server, key and round are the first 16 bytes of the job's
	 * secret_digest, little-endian: one that has not seen the job attach yet believes it of that owner's job alone.
	 */
	DATA_FAIL_JOB = 33,
	DATA_LEAVE = 34, /* agent to server: this node's ranks have left in good order */
	DATA_PING = 35,	 /* either way: nothing heard for a while; DATA_PONG answers */
	DATA_PONG = 36,
	DATA_RDMA =
		37, /* without payload, connecting side: offer RDMA; with, accepting side: data_rdma_offer */
	DATA_ACK = 38,	   /* agent to server: the results numbered 1 to up_to are kept here */
	DATA_RELEASE = 39, /* server to agent: the results numbered 1 to up_to are on every node */
	DATA_MOVE = 40,	   /* either way: which servers the job goes on with; data_moves */
	DATA_OFFERED = 41, /* agent to server: all that is kept was offered, in n_offers OFFERs */
	DATA_NEWCOMERS =
		42, /* an elastic job's home to agent: newcomers wait at nodes that have no rank in it */
	/*
	 * Agent to server: this node keeps the result by rows of round of key: DATA_ROWS_DONE. With is_all it has all results of key up
	 * to that round, of whatever operation. The server need not hold them for it. With is_all and DATA_ROUND_NEVER the node has
	 * forgotten key, by its home's word that none uses it: the server does, too.
	 */
	DATA_HAVE = 43,
	DATA_LEFT = 44, /* either way: departed_node has left in good order */
	/* Either way: small PUSHes, or small RESULTs, in one message: data_packed. */
	DATA_PACK = 45,
	/* Server to agent: its process is about to end, and nodes have left the job. DATA_IDLE is to come when it may. */
	DATA_STOPPING = 46,
	DATA_IDLE = 47, /* agent to server: of the job nothing is under way at this node */
	/*
	 * Either way, between an agent and the job's home: of the operations that all ranks submit
	 * in one order. Status 0: it waits at a node; `rank` has submitted it, as `tensor_round` of
	 * the tensor whose name is the payload. Else ranks differ in it; status and text say how.
	 */
	DATA_ORDINAL = 48,
	DATA_KEEP = 49, /* agent to the job's home: a rank uses key */
	/* The job's home to agent: a node has said FORGET of key, whose name is the payload. FORGET or KEEP is to come. */
	DATA_UNUSED = 50,
	/* Agent to a home that is fresh: it has DECLAREd all tensors that it knows, but those in doubt. No key of any was larger. */
	DATA_NAMED = 51,
	/*
	 * Agent to the job's home: how many ranks of the node follow the others; the highest `turn` that any of its ranks is in
	 * (control.proto, Follow), and how many in that turn are idle. With a status and text: a rank of the node has left the job.
	 */
	DATA_FOLLOW = 52,
	/*
	 * Agent to the job's home: a rank of the node has begun `tensor_round` of the tensor whose name is the payload, of so many
	 * `elements` of `dtype`. What no rank has come to there of its rounds before `first_round` has failed.
	 */
	DATA_BEGUN = 53,
	/*
	 * The job's home to agent: how many ranks of all other nodes follow, and the last `turn` in which all ranks of the job did, and were
	 * idle. With a status and text: they will not.
	 */
	DATA_OTHERS_FOLLOW = 54,
	/* The same: what another node has said in BEGUN, as ranks here follow. */
	DATA_OTHERS_BEGUN = 55,
	/*
	 * Either way, between an agent and the job's home: `rank` does nothing before `tensor_round` of the first tensor of the payload
	 * has ended. With a `missed_round`: nor has the rank come to that round of the second, in which `missed_by` is blocked. With a
	 * status, EDEADLK: nor has that one come to the first, and both rounds fail.
	 */
	DATA_BLOCKED = 56,
};

#define DATA_ROUND_NEVER UINT64_MAX

/*
 * Flags of PUSH and PULL, where both sides have RDMA: the call was made before, on an RDMA connection that broke. Its first
 * one has the number `rail`, and the call's cookie there is `moved`; the last that broke is `last`. After the first it may
 * come by any other connection, after a second by TCP. Whoever knows that call answers it under its new cookie; else it
 * counts as new, unless its payload had arrived and is not sent again: then it is lost, and the answer an error, ENETRESET.
 */
#define DATA_FLAG_MOVED	     1u
#define DATA_FLAG_ARRIVED    2u /* with MOVED: the payload had arrived; len is 0 */
#define DATA_FLAG_AGAIN	     4u /* in PUSH: it may have come before, on a connection that broke */
#define DATA_FLAG_RAIL_SHIFT 3
#define DATA_FLAG_LAST_SHIFT 9
/*
 * In RESULT, alone, and only where both have DATA_FEATURE_KEPT: another node has the result in a ledger that outlives this server's
 * process, until all nodes say that they have it. The part has no other result from now on, whatever is contributed to it.
 */
#define DATA_FLAG_KEPT 0x8000u
#define DATA_RAIL_MAX  63u

static inline unsigned data_flags_rail(unsigned flags)
{
	return flags >> DATA_FLAG_RAIL_SHIFT & DATA_RAIL_MAX;
}

static inline unsigned data_flags_last(unsigned flags)
{
	return flags >> DATA_FLAG_LAST_SHIFT & DATA_RAIL_MAX;
}

/* Of push_pull_rows, see data_rows: the block in which nodes say that they have the result. */
#define DATA_ROWS_DONE 65536u
/* In `root` of PUSH: pieces of this list may have come before; and the node has the result, and wants none. */
#define DATA_ROWS_AGAIN 1u
#define DATA_ROWS_HAS	2u

/*
 * With DATA_FEATURE_SCALES, of an average of float16: above DATA_SCALE_SHIFT in `reduction` is the exponent of the power of two by
 * which each node has divided the sum of its ranks, so that the sum is a number of float16; the same from all nodes.
 */
#define DATA_SCALE_SHIFT 4

static inline unsigned data_reduction(uint8_t reduction)
{
	return reduction & ((1u << DATA_SCALE_SHIFT) - 1);
}

static inline uint32_t data_scale(uint8_t reduction)
{
	return 1u << (reduction >> DATA_SCALE_SHIFT);
}

/* scale: a power of two up to JOB_RANKS_MAX, or 0, which is 1. */
static inline uint8_t data_reduction_scaled(unsigned reduction, uint32_t scale)
{
	return (uint8_t)(reduction | (scale ? (unsigned)__builtin_ctz(scale) : 0)
					     << DATA_SCALE_SHIFT);
}

/* All integers little-endian on the wire. New fields mean a new version. A field without meaning for an op is 0. */
struct data_header {
	uint32_t magic;
	uint8_t version;
	uint8_t op;
	uint16_t flags;	 /* DATA_FLAG_* */
	uint32_t len;	 /* bytes of payload after this header */
	uint32_t cookie; /* names a call on its connection, echoed by the answer; 0: notice */
	uint64_t job;	 /* incarnation number that the home server gave the job; 0 before that */
	union {
		uint64_t key; /* tensor, numbered by the home server from 1 */
		uint64_t
			tensor_round; /* ORDINAL, _BEGUN, BLOCKED: of the tensor that the payload names */
	};
	union {
		uint64_t round;		/* n-th operation on this tensor, from 1 */
		uint64_t ordinal;	/* ORDINAL: n-th operation of each rank, from 1 */
		uint64_t up_to;		/* ACK, RELEASE: results numbered 1 to this */
		uint64_t n_offers;	/* OFFERED: so many were made */
		uint64_t n_newcomers;	/* NEWCOMERS */
		uint64_t tells_others;	/* LEAVE: 1: the receiver is to tell the other nodes */
		uint64_t departed_node; /* LEFT: number of the node that has left */
		uint64_t turn;		/* _FOLLOW */
		uint64_t first_round;	/* _BEGUN: the oldest of the tensor that is open there */
		uint64_t missed_round;	/* BLOCKED; 0: none */
	};
	uint32_t epoch; /* view in which the sender chose this receiver */
	uint32_t node;	/* the contributing node's number in the job */
	/*
	 * push_pull, broadcast, barrier: 0; all_gather: source rank; reduce_scatter: target rank; all_to_all: source
	 * rank * size + target rank; push_pull_rows: the server's number in the job's placement, or DATA_ROWS_DONE
	 */
	uint32_t block;
	uint32_t part; /* number of the part, or of the piece of a list of rows, inside its block */
	uint8_t dtype; /* enum dtype */
	uint8_t operation; /* enum operation */
	uint8_t reduction; /* enum reduction | exponent << DATA_SCALE_SHIFT; 0 where nothing is reduced */
	uint8_t pad;
	/* Of a job that outlives its daemons' processes, numbers modulo 2^32. See bps-protocol(7), DAEMON AND DAEMON. */
	union {
		int32_t status; /* ERROR, FAIL_*, ORDINAL, _FOLLOW, BLOCKED: positive errno; else, but for those below, 0 */
		uint32_t acked;	     /* PUSH: what ACK says */
		uint32_t released;   /* RESULT: what RELEASE says */
		uint32_t attachment; /* OFFER: that of the server that it was for */
	};
	uint64_t offset; /* of this part in its block, bytes; push_pull_rows: 0 */
	union {
		/* Bytes of the whole block; all contributors must agree. push_pull_rows: part_len. */
		uint64_t total;
		/* RESULT of a barrier of an elastic job: 1 if some node has said newcomers. */
		uint64_t newcomers_wait;
		uint64_t elements; /* _BEGUN: of the tensor, or ELEMENTS_VARIABLE */
	};
	uint32_t part_len; /* bytes of this part's data, also where len is 0 */
	union {
		/* broadcast: the source rank. Else, but for those below, 0. */
		uint32_t root;
		/* PUSH of a barrier of an elastic job: 1 if newcomers wait at the node. */
		uint32_t newcomers;
		/*
		 * Of an elastic job, ranks that were gone. PUSH of an all_gather or reduce_scatter: when it was submitted.
		 * RESULT: when it was made.
		 */
		uint32_t n_gone;
		/* PUSH of an accumulate, or of a push_pull of a job with a quorum: 1 if it does. */
		uint32_t waits_for_all;
		/* RESULT of these: how many are in it. */
		uint32_t n_contributions;
		/* PUSH of push_pull_rows: DATA_ROWS_AGAIN and so on. */
		uint32_t rows;
		/* HAVE: 1: all rounds up to this one. */
		uint32_t is_all;
		/* ORDINAL, BLOCKED: one that has submitted it. */
		uint32_t rank;
		uint32_t n_following; /* _FOLLOW */
	};
	union {
		/* Larger is more urgent; a hint, never part of the result. */
		int32_t priority;
		/* RESULT: from 1 for each node; 0: not kept. */
		uint32_t number;
		/* OFFER of a job with a quorum: 1: a contribution that came late. */
		uint32_t is_late;
		/* OFFER of an elastic job: what n_gone was in RESULT, with LEDGER_WAITING. */
		uint32_t n_gone_then;
		uint32_t n_idle;    /* FOLLOW */
		uint32_t missed_by; /* BLOCKED: a rank */
	};
	uint32_t moved; /* with DATA_FLAG_MOVED; else 0 */
};
static_assert(sizeof(struct data_header) == 96, "data_header is wire format");
static_assert(offsetof(struct data_header, job) == 16 &&
		      offsetof(struct data_header, epoch) == 40 &&
		      offsetof(struct data_header, dtype) == 56 &&
		      offsetof(struct data_header, offset) == 64 &&
		      offsetof(struct data_header, moved) == 92,
	      "data_header is wire format");

/*
 * With DATA_FEATURE_PACKS small calls, or small answers, that leave together make one message over TCP. Its header has what they
 * have in common (`job`, `epoch`, `node`), their op in `block` and their number in `part`. So many data_packed follow, then the payloads
 * in the same order; `len` is all of that. Each is a call or an answer as if it had come by itself, with its own cookie: it is
 * answered or refused alone. All of its block, which is block and part 0, lies in it.
 *
 * One seal stands behind the data_packed, and one behind the payloads, unless all are empty. So all that have a payload are made
 * again where that is damaged, and none has arrived of a pack that is wrong.
 */
struct data_packed {
	uint32_t cookie;
	uint16_t len;	/* of its payload */
	uint16_t flags; /* DATA_FLAG_AGAIN, DATA_FLAG_KEPT */
	uint64_t key;
	uint64_t round;
	uint32_t part_len; /* and `total` */
	uint32_t root;
	int32_t status;
	int32_t priority;
	uint8_t dtype;
	uint8_t operation;
	uint8_t reduction;
	uint8_t pad[5];
};
static_assert(sizeof(struct data_packed) == 48, "data_packed is wire format");

#define DATA_PACK_MAX	32u    /* messages in one */
#define DATA_PACKED_MAX 4096u  /* payload of each */
#define DATA_PACKED_LEN 32768u /* payloads of all */

/* Whether it may go with others; whether two may go together. Host order. */
bool data_may_pack(const struct data_header *header);
bool data_packs_with(const struct data_header *a, const struct data_header *b);
/* Of n messages, of which `first` is one, with so many bytes of payload. */
void data_pack_header(const struct data_header *first, uint32_t n, uint32_t len,
		      struct data_header *ret_header);
/* In wire order; and back, with a header that has passed data_header_check(). What comes out has still to pass it. */
void data_pack(const struct data_header *header, struct data_packed *ret_packed);
void data_unpack(const struct data_header *restrict pack, const struct data_packed *restrict packed,
		 struct data_header *restrict ret_header);
/* Whether the messages of a pack, in wire order, have lengths that come to what its header says of all, and nothing unknown. */
bool data_packed_fit(const struct data_header *pack, const struct data_packed *packed);

/*
 * Whose contributions are in a result, where not all need be. Of a job that has a quorum or is asynchronous, and outlives its
 * daemons' processes, it stands behind the data of each RESULT and OFFER of a push_pull that is not empty, and of each
 * accumulate, at data_contributors_at() of the part: so who has a result can tell what is in it when the server is no more.
 *
 * An OFFER with `priority` 1 has none: its data is what this node contributed to a round too late, and has not seen in any
 * result since. `status` of OFFER and OFFERED is a number that grows with each ATTACH: those of one belong together. A server
 * that is fresh makes no sum before all nodes have said OFFERED.
 */
struct data_contributors {
	uint64_t n;	/* contributions to this result; accumulate: since the job began */
	uint64_t round; /* the newest of this part that has closed; accumulate: 0 */
	/*
	 * By node. Bit i: its contribution to that round - i is in this result, or one before. accumulate: its newest
	 * round that is in the sum.
	 */
	uint64_t nodes[];
};

static inline uint32_t data_contributors_at(uint32_t part_len)
{
	return (uint32_t)align_up((uint64_t)part_len, sizeof(uint64_t));
}

/* Where it is, in or behind such a payload. */
static inline struct data_contributors *data_contributors_of(const void *payload, uint32_t part_len)
{
	return (struct data_contributors *)((uintptr_t)payload + data_contributors_at(part_len));
}

/* Bytes of a payload with one. */
static inline uint32_t data_contributors_end(uint32_t part_len, uint32_t n_nodes)
{
	return data_contributors_at(part_len) +
	       (uint32_t)(sizeof(struct data_contributors) + n_nodes * sizeof(uint64_t));
}

/* Elements of its part. dtype is valid. */
static inline size_t data_elements(const struct data_header *header)
{
	return header->part_len / dtype_size(header->dtype);
}

/* Whether it says of a push_pull_rows that the node has the result. */
static inline bool data_is_done(const struct data_header *header)
{
	return header->operation == OPERATION_PUSH_PULL_ROWS && header->block == DATA_ROWS_DONE;
}

/* Payload of BLOCKED: the name of a tensor; with a missed_round a byte of 0 and the name of another. */
#define DATA_BLOCKED_MAX (2 * TENSOR_NAME_MAX + 1)
/* Writes to DATA_BLOCKED_MAX bytes. missed: NULL: there is no other. Returns the length. */
uint32_t data_blocked_pack(const char *tensor, const char *missed, char *ret_payload);
/* Whether the names may be shown; the second is "" without a missed_round. */
bool data_blocked_unpack(const struct data_header *header, const char *payload,
			 char ret_names[2][TENSOR_NAME_MAX + 1]);

/* Host order to wire order and back; in place. */
void data_contributors_swap(struct data_contributors *contributors, uint32_t n_nodes);
/* Whether results of such a part have one, in a job with stragglers that outlives its daemons' processes. */
bool data_has_contributors(const struct stragglers *stragglers, unsigned operation,
			   uint32_t part_len);

/*
 * How each payload of push_pull_rows starts. Behind it come the numbers of the piece's rows (int64, ascending, each
 * once), then their values, row by row: both as they are in memory.
 *
 * A list of n rows travels in pieces of `step` rows, the last with what is left; an empty list is one empty piece. A node
 * pushes to each server that a row of the table belongs to its rows there. All pieces but the last are answered at once,
 * without payload; the last, when the round is complete, with the first piece of the result, which may be of other
 * length and step. Further pieces are asked for with PULL.
 *
 * Of a job that outlives its daemons' processes a server holds its result until each node has said HAVE. A node does when all
 * results of all servers are in its trainers' memory; then it makes one more contribution to the round, without data, of block
 * DATA_ROWS_DONE: the round is over when all nodes have, and until then each can contribute again, should a server be lost.
 */
struct data_rows {
	uint64_t rows;	/* of the table */
	uint64_t n;	/* in the whole list */
	uint32_t width; /* elements of a row */
	uint32_t step;
	uint64_t pad;
};
static_assert(sizeof(struct data_rows) == 32, "data_rows is wire format");

/* Bytes of a row's values: with a row's number it must fit into one message. */
#define DATA_ROW_MAX (DATA_PAYLOAD_MAX - sizeof(struct data_rows) - sizeof(int64_t))
/* Pieces but the last have at least so many bytes of rows, so that their number stays in proportion to what they hold. */
#define DATA_STEP_MIN ((PART_BYTES_MIN - sizeof(struct data_rows)) / 2)

/* A piece of a list, taken apart: pointers into the payload. */
struct data_piece {
	struct data_rows list;
	uint64_t n_pieces;   /* of the list */
	size_t row_len;	     /* bytes of a row's values */
	size_t n;	     /* rows here */
	const int64_t *rows; /* n entries; what they say has not been looked at */
	const void *values;
};

/* Rows of each full piece for a part size, for rows of row_len bytes. */
uint32_t data_rows_step(uint32_t part_bytes, size_t row_len);
/* Bytes of a payload with n rows. */
static inline size_t data_rows_len(size_t n, size_t row_len)
{
	return sizeof(struct data_rows) + n * (sizeof(int64_t) + row_len);
}

/*
 * Payload of MOVE: for each server of the job's view how often it has gone and come, uint32. Odd: the job goes on without it.
 * What two say is united by taking the larger of each; all odd counts as each one more. Calls and notices about data carry in
 * `epoch` a digest of it, data_moves_epoch(), and count only where that is the receiver's.
 *
 * Of an elastic job as many numbers follow as the run began with ranks: 0, DATA_MOVES_LOST or DATA_MOVES_LEFT. Then come the
 * servers that were added to the job since it began, `part` of them: struct data_added.
 */
#define DATA_MOVES_LOST	 1u
#define DATA_MOVES_LEFT	 3u /* in good order */
#define DATA_MOVES_MAX	 65535u
#define DATA_MOVES_OFTEN (1u << 30) /* more often does no server come and go */

/*
 * A server that is in the job and not in its view: it came to the cluster later, or came back at another address. It is known by name
 * and address together; each node numbers them as it hears of them, behind the view's.
 */
struct data_added {
	char name[64], address[96]; /* with their NUL, which all behind it is too */
	uint32_t bandwidth_mbps;
	uint32_t moves; /* as of the others: odd: the job goes on without it */
};
static_assert(sizeof(struct data_added) == 168, "data_added is wire format");
#define DATA_ADDED_MAX 64u

struct data_added_set {
	uint32_t n;
	struct data_added servers[DATA_ADDED_MAX];
};

/* Its number in the set; set->n: it is not there. */
uint32_t data_added_find(const struct data_added_set *set, const char *name, const char *address);
/* Whether it is what it has to be, as it came from outside. */
bool data_added_valid(const struct data_added *added);
/* The same of sets, as one that was received: no server is in it twice. */
bool data_added_set_valid(const struct data_added_set *set);
/* What either knows of servers that the other does not, or of their moves: adds to *more (b knows more) and *less. */
void data_added_compare(const struct data_added_set *a, const struct data_added_set *b, bool *more,
			bool *less);

/* All 0 and none leaves the epoch as it is. added may be NULL. */
uint32_t data_moves_epoch(uint32_t epoch, const uint32_t *moves, size_t n,
			  const struct data_added_set *added);
/* Whether an entry can be: of a rank, or of a server. */
bool data_moves_valid(uint32_t moves, bool of_rank);
/*
 * Takes over what is more in `from` and `from_added`, of what can be; the latter may be NULL, and `added` with it. Returns whether anything was.
 * What does not fit into `added` is left out.
 */
bool data_moves_unite(uint32_t *moves, const uint32_t *from, size_t n, size_t n_servers,
		      struct data_added_set *added, const struct data_added_set *from_added);
/* In place, both ways. */
void data_moves_swap(uint32_t *moves, size_t n);
/* Payload of a MOVE: its length, and to and from it. decode: header has passed data_header_check(); false: it is no such list. */
static inline size_t data_moves_len(size_t n, const struct data_added_set *added)
{
	return n * sizeof(uint32_t) + added->n * sizeof(added->servers[0]);
}
void data_moves_encode(void *payload, const uint32_t *moves, size_t n,
		       const struct data_added_set *added);
/* Numbers in the payload of a MOVE. */
static inline size_t data_moves_n(const struct data_header *header)
{
	return (header->len - header->part * sizeof(struct data_added)) / sizeof(uint32_t);
}
bool data_moves_decode(const struct data_header *header, const void *payload, uint32_t *moves,
		       struct data_added_set *added);

void data_rows_encode(struct data_rows *rows);
void data_rows_decode(struct data_rows *rows);

/*
 * Takes a payload from outside apart; header has passed data_header_check(), payload is aligned to 8 bytes. Returns 0, or
 * -EPROTO with *ret_why a static text.
 */
int data_rows_parse(const struct data_header *header, const void *payload,
		    struct data_piece *ret_piece, const char **ret_why);

#define DATA_NONCE_LEN 32
#define DATA_PROOF_LEN 32

/*
 * First bytes on a data connection, in both directions. proof is zero in the connecting side's hello; in the accepting
 * side's it is HMAC-SHA256(cluster key, "bps-server" || connecting hello || accepting hello with proof zero). The
 * connecting side then sends 32 bytes more: HMAC-SHA256(cluster key, "bps-client" || the same two hellos). Without a
 * configured key the key is empty, and the proofs only detect a mismatch of configuration.
 */
struct data_hello {
	uint32_t magic;
	uint8_t version;     /* highest spoken; both sides use the lower of the two */
	uint8_t version_min; /* lowest spoken */
	uint16_t
		lane; /* low byte: index of this connection among those made together; high byte: number of
			      * that set, so that connections made anew are not taken for more of the old */
	uint64_t features;
	/*
	 * A random number: in the accepting side's hello that of its process, which others may know; in the connecting side's
	 * one that the accepting side alone hears, the same for all connections of one peer.
	 */
	uint64_t sender;
	char name[64]; /* its node's name, for messages; NUL-terminated */
	uint8_t nonce[DATA_NONCE_LEN];
	uint8_t proof[DATA_PROOF_LEN];
};
static_assert(sizeof(struct data_hello) == 152, "data_hello is wire format");

/*
 * RDMA. The TCP connections of a peer stay: they carry set-up, notices, and calls that are moved. Where both hellos have
 * the feature, the accepting side sends an offer, a notice with the addresses of its RDMA ports and a nonce; the connecting
 * side makes a reliable connection to each by rdma-cm, with data_rdma_hello as private data, and is answered by another
 * in the private data of the acceptance. So both prove once more that they know the cluster key, and each that it is the
 * one whom the other shook hands with. PUSH, PULL and their answers then take these connections.
 *
 * A message is a SEND of a data_rdma, and for RDMA_MESSAGE of a data_header and a payload up to DATA_RDMA_EAGER behind
 * it. A longer payload goes by an RDMA WRITE: that of a result into the target that its call named, before the message, which
 * says DATA_RDMA_WRITTEN; any other into the memory of the RDMA_GRANT that answers its message, before an RDMA_PLACED. Each
 * SEND uses up one of the other side's posted receives; `credits` says how many were posted anew.
 *
 * A key with DATA_RDMA_WINDOW is that of a memory window, which opens those bytes alone, to this connection alone, once: the
 * answer to the call that named a target, whatever it is, and the RDMA_PLACED are SENDs WITH INVALIDATE of that key. Who
 * opened it takes neither without.
 */
enum data_rdma_kind {
	RDMA_MESSAGE = 1, /* address, key, len: the target of a result, or 0 */
	RDMA_GRANT = 2,	 /* cookie: of the message whose payload goes to address, key, len; place */
	RDMA_CREDIT = 3, /* nothing but credits */
	RDMA_PLACED = 4, /* place: of the grant; its len bytes are written */
};

#define DATA_RDMA_WINDOW  1u
#define DATA_RDMA_WRITTEN 2u

struct data_rdma {
	uint8_t kind;
	uint8_t flags; /* DATA_RDMA_WINDOW, DATA_RDMA_WRITTEN */
	uint16_t credits;
	uint32_t cookie;
	uint64_t address;
	uint32_t key;
	uint32_t len;
	uint32_t place;
	uint32_t pad;
};
static_assert(sizeof(struct data_rdma) == 32, "data_rdma is wire format");

#define DATA_RDMA_EAGER	   1024u
#define DATA_RDMA_RECEIVES 1024u /* most receives a side may post */
#define DATA_RDMA_RAILS	   8

struct data_rdma_rail {
	uint8_t address[16]; /* IPv6, or IPv4 mapped into it */
	uint16_t port;	     /* of rdma-cm */
	uint16_t mtu;	     /* bytes of payload in a packet, as the port is set: 256 to 4096 */
	uint32_t pad;
};

struct data_rdma_offer {
	uint8_t nonce[DATA_NONCE_LEN];
	uint32_t n_rails; /* 1 to DATA_RDMA_RAILS */
	uint32_t pad;
	struct data_rdma_rail rails[DATA_RDMA_RAILS];
};
static_assert(sizeof(struct data_rdma_offer) == 232, "data_rdma_offer is wire format");

/*
 * Private data, both ways. proof: HMAC-SHA256(cluster key, "bps-rdma-client" || offer's nonce || this with proof zero); the
 * accepting side's: HMAC-SHA256(cluster key, "bps-rdma-server" || offer's nonce || the connecting side's || this with
 * proof zero). 56 bytes are what rdma-cm has room for.
 */
struct data_rdma_hello {
	uint32_t magic;
	uint8_t version; /* DATA_RDMA_VERSION */
	uint8_t rail; /* to DATA_RAIL_MAX: number of this connection, not in use for another of the peer */
	uint16_t receives; /* posted, 4 to DATA_RDMA_RECEIVES */
	uint64_t sender;   /* as in data_hello */
	uint16_t group;	   /* the high byte of data_hello.lane */
	uint16_t
		mtu; /* connecting side: as in data_rdma_rail; both use the lesser of the two ports' */
	uint8_t pad[4];
	uint8_t proof[DATA_PROOF_LEN];
};
static_assert(sizeof(struct data_rdma_hello) == 56, "data_rdma_hello is wire format");

#define DATA_RDMA_VERSION 3

void data_rdma_swap(struct data_rdma *head); /* both ways, as the others */
void data_rdma_offer_swap(struct data_rdma_offer *offer);
void data_rdma_hello_swap(struct data_rdma_hello *hello);

/* Host order to wire order and back; in place; no-ops on little-endian machines. */
void data_header_encode(struct data_header *header);
void data_header_decode(struct data_header *header);
void data_hello_encode(struct data_hello *hello);
void data_hello_decode(struct data_hello *hello);

/*
 * Checks a decoded header from outside: magic, version, op, flags, length limit for its op, enums, part within total.
 * Returns 0, or -EPROTO with *ret_why a static text that says what is wrong.
 */
int data_header_check(const struct data_header *header, const char **ret_why);

/* Checks a decoded hello from outside: magic, versions overlap, name terminated and printable. As above. */
int data_hello_check(struct data_hello *hello, const char **ret_why);
