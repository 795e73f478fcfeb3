/* What a server holds of its first job: agent/ and server/ have names in common, so nothing else sees both. */
#pragma once

#include <stddef.h>

struct server;

/* Results of push_pull_rows that not all nodes have. */
size_t held_at(const struct server *server);
/* Tensors that are in use. */
size_t held_tensors_at(const struct server *server);
