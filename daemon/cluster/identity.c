/*
 * A member's id is a digest of the secret that its daemon has made for itself. daemon.c computes
 * its own id; coordinator.c checks that a registering member's id and secret go together.
 */
#include "cluster/cluster.h"

#include <endian.h>
#include <openssl/evp.h>

static const char label[10] = "bps-member";

uint64_t member_id(const uint8_t secret[MEMBER_SECRET_LEN])
{
	uint8_t text[sizeof(label) + MEMBER_SECRET_LEN], digest[EVP_MAX_MD_SIZE];
	unsigned len = 0;
	uint64_t id;

	memcpy(text, label, sizeof(label));
	memcpy(text + sizeof(label), secret, MEMBER_SECRET_LEN);
	if (!EVP_Digest(text, sizeof(text), digest, &len, EVP_sha256(), NULL) || len < sizeof(id))
		return 0;
	memcpy(&id, digest, sizeof(id));
	return le64toh(id) | 1;
}
