/*
 * Parses options, checks them and prints them, all by the table that config.def makes. main.c
 * reads command line and file at the start and the file again on SIGHUP.
 */
#include "config.h"
#include <ctype.h>
#include <ini.h>
#include <inttypes.h>
#include <stdarg.h>

enum option_type { TYPE_string, TYPE_choice, TYPE_u32, TYPE_size, TYPE_time, TYPE_rate };
enum option_when { START, LIVE };

/*
 * A row of the table. Numbers and words share the columns: a choice has its words where a number
 * has its minimum.
 */
struct option {
	const char *name;
	enum option_type type;
	const char *def_text;
	uint64_t def_number;
	const char *words;
	uint64_t min, max;
	enum option_when when;
	const char *help;
	size_t offset;
};

/* clang-format off */
#define IS_TEXT(x)    _Generic((x), char *: true, const char *: true, default: false)
#define AS_TEXT(x)    _Generic((x), char *: (x), const char *: (x), default: NULL)
#define AS_NUMBER(x)  _Generic((x), char *: 0, const char *: 0, default: (x))
/* clang-format on */

static const struct option options[] = {
#define CONFIG_ROW(name_, type_, def_, min_, max_, when_, help_) \
	{ .name = #name_,                                        \
	  .type = TYPE_##type_,                                  \
	  .def_text = AS_TEXT(def_),                             \
	  .def_number = AS_NUMBER(def_),                         \
	  .words = AS_TEXT(min_),                                \
	  .min = AS_NUMBER(min_),                                \
	  .max = (max_),                                         \
	  .when = when_,                                         \
	  .help = help_,                                         \
	  .offset = offsetof(struct config, name_) },
	CONFIG_OPTIONS(CONFIG_ROW)
#undef CONFIG_ROW
};

struct unit {
	const char *suffix;
	uint64_t factor;
};

static const struct unit size_units[] = {
	{ "", 1 },
	{ "K", 1ull << 10 },
	{ "M", 1ull << 20 },
	{ "G", 1ull << 30 },
	{ "T", 1ull << 40 },
	{ "KiB", 1ull << 10 },
	{ "MiB", 1ull << 20 },
	{ "GiB", 1ull << 30 },
	{ "TiB", 1ull << 40 },
};
static const struct unit time_units[] = { { "ms", 1 }, { "s", 1000 }, { "m", 60000 } };
static const struct unit rate_units[] = { { "Mbit", 1 }, { "Gbit", 1000 }, { "Tbit", 1000000 } };

static bool is_text(enum option_type type)
{
	return type == TYPE_string || type == TYPE_choice;
}

static void *field(const struct config *config, const struct option *option)
{
	return (char *)config + option->offset;
}

static uint64_t number_get(const struct config *config, const struct option *option)
{
	if (option->type == TYPE_u32)
		return *(uint32_t *)field(config, option);
	return *(uint64_t *)field(config, option);
}

static void number_set(struct config *config, const struct option *option, uint64_t number)
{
	if (option->type == TYPE_u32)
		*(uint32_t *)field(config, option) = (uint32_t)number;
	else
		*(uint64_t *)field(config, option) = number;
}

static int text_set(struct config *config, const struct option *option, const char *text)
{
	char **at = field(config, option);
	char *copy = strdup(text);

	if (!copy)
		return error_origin(-ENOMEM);
	free(*at);
	*at = copy;
	return 0;
}

int config_init(struct config *config)
{
	*config = (struct config){ 0 };
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		const struct option *option = &options[i];

		if (!is_text(option->type)) {
			number_set(config, option, option->def_number);
		} else if (text_set(config, option, option->def_text)) {
			config_done(config);
			return error_origin(-ENOMEM);
		}
	}
	return 0;
}

void config_done(struct config *config)
{
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		if (is_text(options[i].type))
			freep(field(config, &options[i]));
	}
}

static void units_of(enum option_type type, const struct unit **ret_units, size_t *ret_n)
{
	static const struct unit one[] = { { "", 1 } };

	switch (type) {
	case TYPE_size:
		*ret_units = size_units;
		*ret_n = ARRAY_SIZE(size_units);
		break;
	case TYPE_time:
		*ret_units = time_units;
		*ret_n = ARRAY_SIZE(time_units);
		break;
	case TYPE_rate:
		*ret_units = rate_units;
		*ret_n = ARRAY_SIZE(rate_units);
		break;
	default:
		*ret_units = one;
		*ret_n = ARRAY_SIZE(one);
	}
}

/* "64K" by the units of its type. A bare 0 needs no unit. */
static int number_parse(enum option_type type, const char *text, uint64_t *ret_number)
{
	const struct unit *units;
	uint64_t number;
	size_t n_units;
	char *end;

	if (!isdigit((unsigned char)*text))
		return -EINVAL;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno)
		return -ERANGE;
	while (*end == ' ')
		end++;
	if (number == 0 && !*end) {
		*ret_number = 0;
		return 0;
	}
	units_of(type, &units, &n_units);
	for (size_t i = 0; i < n_units; i++) {
		if (strcasecmp(end, units[i].suffix))
			continue;
		if (MUL_OVERFLOW(number, units[i].factor, ret_number))
			return -ERANGE;
		return 0;
	}
	return -EINVAL;
}

/* The number as the table writes it: in the largest unit that divides it. */
static void number_format(enum option_type type, uint64_t number, char *buffer, size_t len)
{
	const struct unit *units, *best = NULL;
	size_t n_units;

	units_of(type, &units, &n_units);
	for (size_t i = 0; i < n_units; i++) {
		if (number && number % units[i].factor == 0 &&
		    (!best || units[i].factor > best->factor))
			best = &units[i];
	}
	(void)snprintf(buffer, len, "%" PRIu64 "%s", best ? number / best->factor : number,
		       best ? best->suffix : "");
}

static const char *example_of(enum option_type type)
{
	switch (type) {
	case TYPE_size:
		return "a size such as 4096, 64K, 1M or 2G";
	case TYPE_time:
		return "a time such as 500ms, 10s or 2m";
	case TYPE_rate:
		return "a rate such as 100Mbit or 10Gbit";
	default:
		return "a number";
	}
}

static bool word_in(const char *words, const char *word)
{
	size_t len = strlen(word);

	if (strchr(word, '|'))
		return false;
	for (const char *at = words; len && at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
		if (!strncmp(at, word, len) && (at[len] == '|' || !at[len]))
			return true;
	}
	return false;
}

static int set_number(struct config *config, const struct option *option, const char *value,
		      struct failure *failure)
{
	char low[32], high[32];
	uint64_t number = 0;
	int r = number_parse(option->type, value, &number);

	if (r == -EINVAL)
		return failure_set(failure, -EINVAL, "%s: \"%s\" is not %s", option->name, value,
				   example_of(option->type));
	/* Where 0 is what it is without a word, it may be said, too. */
	if (!r && !number && !option->def_number) {
		number_set(config, option, 0);
		return 0;
	}
	if (r || number < option->min || number > option->max) {
		number_format(option->type, option->min, low, sizeof(low));
		number_format(option->type, option->max, high, sizeof(high));
		return failure_set(failure, -ERANGE, "%s: %s is not between %s and %s",
				   option->name, value, low, high);
	}
	number_set(config, option, number);
	return 0;
}

static int set_text(struct config *config, const struct option *option, const char *value,
		    struct failure *failure)
{
	if (option->type == TYPE_choice) {
		if (!word_in(option->words, value))
			return failure_set(failure, -EINVAL, "%s: \"%s\" is not one of %s",
					   option->name, value, option->words);
	} else if (strlen(value) < option->min) {
		return failure_set(failure, -EINVAL, "%s: must not be empty", option->name);
	} else if (strlen(value) > option->max) {
		return failure_set(failure, -ERANGE, "%s: longer than %" PRIu64 " bytes",
				   option->name, option->max);
	}
	if (text_set(config, option, value))
		return failure_set(failure, -ENOMEM, "%s: out of memory", option->name);
	return 0;
}

static bool name_equal(const char *name, const char *key)
{
	for (; *name && *key; name++, key++) {
		if (*name != (*key == '-' ? '_' : *key))
			return false;
	}
	return !*name && !*key;
}

/* Edit distance, for "did you mean": names are short, so the quadratic way will do. */
static size_t distance(const char *a, const char *b)
{
	size_t row[64], len = MIN(strlen(b), ARRAY_SIZE(row) - 1);

	for (size_t j = 0; j <= len; j++)
		row[j] = j;
	for (size_t i = 0; a[i]; i++) {
		size_t diagonal = row[0];

		row[0] = i + 1;
		for (size_t j = 0; j < len; j++) {
			size_t replace = diagonal + (a[i] != b[j]);

			diagonal = row[j + 1];
			row[j + 1] = MIN(replace, MIN(row[j], row[j + 1]) + 1);
		}
	}
	return row[len];
}

static const char *nearest(const char *key)
{
	const char *best = options[0].name;

	for (size_t i = 1; i < ARRAY_SIZE(options); i++) {
		if (distance(options[i].name, key) < distance(best, key))
			best = options[i].name;
	}
	return best;
}

int config_set(struct config *config, const char *key, const char *value, struct failure *failure)
{
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		if (!name_equal(options[i].name, key))
			continue;
		if (is_text(options[i].type))
			return set_text(config, &options[i], value, failure);
		return set_number(config, &options[i], value, failure);
	}
	return failure_set(failure, -ENOENT, "%.60s: no such option; did you mean %s?", key,
			   nearest(key));
}

struct load {
	struct config *config;
	struct failure failure;
	int r;
};

static int load_line(void *user, const char *section, const char *name, const char *value)
{
	struct load *load = user;

	if (load->r)
		return 0;
	if (*section)
		load->r = failure_set(&load->failure, -EINVAL,
				      "[%.60s]: this file has no sections, only key = value",
				      section);
	else
		load->r = config_set(load->config, name, value ? value : "", &load->failure);
	return !load->r;
}

int config_load(struct config *config, const char *path, struct failure *failure)
{
	struct load load = { .config = config };
	FILE *file = fopen(path, "re");
	int line;

	if (!file)
		return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
	line = ini_parse_file(file, load_line, &load);
	(void)fclose(file);
	if (load.r)
		return failure_set(failure, load.r, "%s:%d: %s", path, line, load.failure.text);
	if (line < 0)
		return failure_set(failure, -EIO, "%s: cannot be read", path);
	if (line > 0)
		return failure_set(failure, -EINVAL, "%s:%d: neither a comment nor key = value",
				   path, line);
	return 0;
}

unsigned config_parse_roles(const char *text)
{
	char copy[64], *save = NULL;
	unsigned roles = 0;

	(void)snprintf(copy, sizeof(copy), "%s", text);
	for (char *word = strtok_r(copy, ", ", &save); word; word = strtok_r(NULL, ", ", &save)) {
		if (!strcmp(word, "agent"))
			roles |= 1;
		else if (!strcmp(word, "server"))
			roles |= 2;
		else
			return 0;
	}
	return roles;
}

int config_check(const struct config *config, struct failure *failure)
{
	bool tls = *config->tls_ca || *config->tls_cert || *config->tls_key;

	if (*config->roles && !config_parse_roles(config->roles))
		return failure_set(failure, -EINVAL,
				   "roles: \"%s\" is not a list of agent and server",
				   config->roles);
	if (!strcmp(config->cluster, "coordinator") && !*config->coordinator &&
	    !*config->coordinator_listen)
		return failure_set(
			failure, -EINVAL,
			"cluster = coordinator needs coordinator = host:port (or, on the "
			"coordinator itself, coordinator_listen)");
	if (!strcmp(config->cluster, "coordinator") && !*config->address)
		return failure_set(failure, -EINVAL,
				   "cluster = coordinator needs address = host:port, under which "
				   "other daemons reach this one");
	if (!strcmp(config->cluster, "etcd") && !(*config->etcd_endpoints && *config->address))
		return failure_set(failure, -EINVAL,
				   "cluster = etcd needs etcd_endpoints = host:port,..., and "
				   "address = host:port, under which other daemons reach this one");
	if (strcmp(config->cluster, "coordinator") && *config->coordinator_listen)
		return failure_set(failure, -EINVAL,
				   "coordinator_listen needs cluster = coordinator");
	if (tls && !(*config->tls_ca && *config->tls_cert && *config->tls_key))
		return failure_set(failure, -EINVAL,
				   "tls_ca, tls_cert and tls_key belong together: set all or none");
	return 0;
}

int config_reload(struct config *config, const struct config *fresh, char *ret_restart, size_t len)
{
	size_t used = 0;

	*ret_restart = 0;
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		const struct option *option = &options[i];
		bool same = is_text(option->type)
				    ? !strcmp(*(char **)field(config, option),
					      *(char **)field(fresh, option))
				    : number_get(config, option) == number_get(fresh, option);

		if (same)
			continue;
		if (option->when == START) {
			int n = snprintf(ret_restart + used, len - used, "%s%s", used ? ", " : "",
					 option->name);
			used = MIN(used + (size_t)MAX(n, 0), len - 1);
		} else if (!is_text(option->type)) {
			number_set(config, option, number_get(fresh, option));
		} else if (text_set(config, option, *(char **)field(fresh, option))) {
			return error_origin(-ENOMEM);
		}
	}
	return 0;
}

static void default_of(const struct option *option, char *buffer, size_t len)
{
	if (is_text(option->type))
		(void)snprintf(buffer, len, "%s", option->def_text);
	else
		number_format(option->type, option->def_number, buffer, len);
}

static const char *kind_of(const struct option *option)
{
	static const char *const kinds[] = { "TEXT", NULL, "N", "SIZE", "TIME", "RATE" };

	return option->type == TYPE_choice ? option->words : kinds[option->type];
}

/* The words of text in lines of at most width columns, each after indent. */
static void print_wrapped(FILE *out, const char *indent, const char *text, size_t width)
{
	size_t column = 0;

	while (*text) {
		size_t word = strcspn(text, " ");

		if (column && column + 1 + word > width) {
			fputc('\n', out);
			column = 0;
		}
		fprintf(out, "%s%.*s", column ? " " : indent, (int)word, text);
		column += word + 1;
		text += word;
		text += strspn(text, " ");
	}
	fputc('\n', out);
}

void config_print_help(FILE *out)
{
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		char value[128], dashed[64];
		size_t n = 0;

		default_of(&options[i], value, sizeof(value));
		for (const char *c = options[i].name; *c; c++)
			dashed[n++] = *c == '_' ? '-' : *c;
		dashed[n] = 0;
		fprintf(out, "  --%s=%s%s%s%s\n", dashed, kind_of(&options[i]), *value ? " (" : "",
			value, *value ? ")" : "");
		print_wrapped(out, "        ", options[i].help, 88);
	}
}

void config_print_sample(FILE *out)
{
	fprintf(out,
		"# /etc/bps/bps-daemon.conf: see bps-daemon.conf(5). Each line shows a default.\n");
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		char value[128];

		default_of(&options[i], value, sizeof(value));
		fputc('\n', out);
		print_wrapped(out, "# ", options[i].help, 88);
		fprintf(out, "#%s = %s\n", options[i].name, value);
	}
}

void config_print_man(FILE *out)
{
	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		char value[128];

		default_of(&options[i], value, sizeof(value));
		fprintf(out, "*%s* = _%s_\n", options[i].name, kind_of(&options[i]));
		print_wrapped(out, "\t", options[i].help, 88);
		fprintf(out, "\tDefault: %s.%s\n\n", *value ? value : "empty",
			options[i].when == LIVE ? " Read again on SIGHUP." : "");
	}
}
