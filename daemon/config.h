/*
 * Options of the daemon, by one table (config.def). Order of precedence: command line, file, default. Filled before
 * threads start and constant from then on, but for LIVE options, which the control thread may change on SIGHUP.
 */
#pragma once

#include "base/error.h"
#include "config.def"
#include <stdio.h>

#define CONFIG_TYPE_string char *
#define CONFIG_TYPE_choice char *
#define CONFIG_TYPE_u32	   uint32_t
#define CONFIG_TYPE_size   uint64_t
#define CONFIG_TYPE_time   uint64_t
#define CONFIG_TYPE_rate   uint64_t

struct config {
#define CONFIG_FIELD(name, type, def, min, max, when, help) CONFIG_TYPE_##type name;
	CONFIG_OPTIONS(CONFIG_FIELD)
#undef CONFIG_FIELD
};

/* Sets every default. Returns 0 or -ENOMEM. */
int config_init(struct config *config);
void config_done(struct config *config);

/*
 * Sets one option from text. key may be written with - or _. Returns 0, or -ENOENT (no such option; the text suggests
 * the nearest), -EINVAL, -ERANGE, -ENOMEM.
 */
int config_set(struct config *config, const char *key, const char *value, struct failure *failure);

/*
 * Reads "key = value" lines; # and ; start comments. Stops at the first error: the failure names file and line and the
 * options before it are set. Returns 0, -ENOENT and other -errno for the file, or as config_set().
 */
int config_load(struct config *config, const char *path, struct failure *failure);

/* Checks what needs more than one option. Returns 0 or -EINVAL. */
int config_check(const struct config *config, struct failure *failure);

/*
 * Takes over LIVE options from fresh, and writes the names of START options that differ, separated by ", ", to
 * ret_restart (at most len bytes). Returns 0 or -ENOMEM.
 */
int config_reload(struct config *config, const struct config *fresh, char *ret_restart, size_t len);

/* Bits of enum role (cluster/cluster.h) for a list such as "agent, server"; 0 when it is empty or a word is none. */
unsigned config_parse_roles(const char *text);

/* The table for people: --help, a sample file with every default commented out, the rows of bps-daemon.conf(5). */
void config_print_help(FILE *out);
void config_print_sample(FILE *out);
void config_print_man(FILE *out);
