/*
 * The static list of nodes (bps-cluster.conf(5)). Bad files give an error that names file, line and remedy; nothing a
 * file can hold does more harm than that.
 */
#pragma once

#include "cluster/cluster.h"

#define CLUSTER_FILE_MAX  (1u << 20) /* bytes */
#define CLUSTER_NODES_MAX 4096u
#define CLUSTER_LINE_MAX  190u /* bytes; what libinih's buffer of 200 takes, with room to spare */

/*
 * Parses len bytes. path is for messages alone. Returns 0 and an array (free() it) of at least one member, ids 0, in
 * the file's order; or -EINVAL, -ENOMEM with a failure.
 */
int cluster_file_parse(const char *path, const char *text, size_t len, struct failure *failure,
		       struct view_member **ret_members, size_t *ret_n_members);
/* The same of a file; other errnos as open(2) and read(2) have them. */
int cluster_file_read(const char *path, struct failure *failure, struct view_member **ret_members,
		      size_t *ret_n_members);
