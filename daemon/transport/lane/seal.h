/*
 * What the bytes of one direction of a TCP connection are sealed with: nothing, CRC-32C, or, where there is a cluster key, tags
 * of AES-128-GMAC under a key that only this direction of this connection has. Each tag has the next number as its nonce, so
 * that a tag is right for its bytes at its place alone. Belongs to a lane; its worker's thread.
 *
 * Encryption will stand here: what is authenticated now would be AES-128-GCM's text instead.
 */
#pragma once

#include "proto/data.h"

#define SEAL_MAX DATA_TAG_LEN

struct gmac;

struct seal {
	struct gmac *gmac; /* NULL: no tags */
	uint64_t number;   /* of the tag that is begun next */
	uint32_t crc;
	unsigned len;	/* of each tag or checksum; 0: nothing is sealed */
	bool is_broken; /* its library failed: none is right from here on */
};

/* Any thread, from seal_init() to seal_done(). */
static inline bool seal_is_checksum(const struct seal *seal)
{
	return seal->len && !seal->gmac;
}

/* key: DATA_PROOF_LEN bytes, or NULL for checksums. Returns 0 or -ENOMEM. */
int seal_init(struct seal *seal, const unsigned char *key);
void seal_done(struct seal *seal);
/* Pieces of what one tag stands for, in order. */
void seal_begin(struct seal *seal);
void seal_add(struct seal *seal, const void *data, size_t len);
/* A piece by its checksum, of at most CRC32C_JOIN_MAX bytes, where seals are checksums: seal_is_checksum(). */
void seal_join(struct seal *seal, uint32_t crc, size_t len);
/* seal->len bytes. */
void seal_end(struct seal *seal, unsigned char *ret_tag);
/* Ends it, and says whether the other side's tag is that; the time it takes says nothing. */
bool seal_fits(struct seal *seal, const unsigned char *tag);
/* All three for one piece. */
void seal_make(struct seal *seal, const void *data, size_t len, unsigned char *ret_tag);
