/*
 * libinih splits lines into keys and values and knows comments; what it does not do is done around it: it cuts section
 * names at 50 bytes, says nothing of empty or repeated sections, and joins indented lines to the value before. So lines
 * pass through line_next(), which takes the sections out and the indentation away, and counts.
 */
#include "cluster/cluster_file.h"
#include "cluster/member.h"

#include <fcntl.h>
#include <ini.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>

enum { KEY_ADDRESS = 1, KEY_ROLES = 2, KEY_BANDWIDTH = 4 };

struct parser {
	const char *path;
	const char *at, *end;
	unsigned line;
	struct failure *failure; /* of the first error; failed tells that there is one */
	bool failed;
	unsigned failed_line;
	struct view_member *members;
	unsigned *lines; /* where each one's section begins */
	size_t n_members, capacity;
	unsigned keys; /* of the newest member, that were given */
};

static int _printf_(3, 4) fail_at(struct parser *p, unsigned line, const char *format, ...)
{
	char text[256];
	va_list args;

	if (p->failed)
		return -EINVAL;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	p->failed = true;
	p->failed_line = line;
	return failure_set(p->failure, -EINVAL, "%s:%u: %s", p->path, line, text);
}

static struct view_member *newest(struct parser *p)
{
	return p->n_members ? &p->members[p->n_members - 1] : NULL;
}

/* What only the end of a section tells. */
static int section_end(struct parser *p)
{
	struct view_member *member = newest(p);
	unsigned line = member ? p->lines[p->n_members - 1] : 0;

	if (!member)
		return 0;
	if (!(p->keys & KEY_ROLES))
		member->roles = ROLE_AGENT | ROLE_SERVER;
	if (!(p->keys & KEY_ADDRESS) && member->roles & ROLE_SERVER)
		return fail_at(
			p, line,
			"node %s is a server and has no address: add \"address = host:port\", "
			"or \"roles = agent\"",
			member->name);
	for (size_t i = 0; *member->address && i + 1 < p->n_members; i++) {
		if (!strcmp(p->members[i].address, member->address))
			return fail_at(p, line,
				       "node %s has the address %s of node %s (line %u): give each "
				       "its own",
				       member->name, member->address, p->members[i].name,
				       p->lines[i]);
	}
	return 0;
}

static int member_add(struct parser *p, const char *name)
{
	const char *why;

	if (member_name_check(name, &why))
		return fail_at(p, p->line, "\"%s\": %s", name, why);
	for (size_t i = 0; i < p->n_members; i++) {
		if (!strcmp(p->members[i].name, name))
			return fail_at(
				p, p->line,
				"node %s is listed twice, first in line %u: remove or rename "
				"one",
				name, p->lines[i]);
	}
	if (p->n_members == CLUSTER_NODES_MAX)
		return fail_at(p, p->line, "more than %u nodes", CLUSTER_NODES_MAX);
	if (p->n_members == p->capacity) {
		size_t capacity = p->capacity ? 2 * p->capacity : 16;
		void *members = realloc(p->members, capacity * sizeof(*p->members));
		void *lines;

		if (members)
			p->members = members;
		lines = members ? realloc(p->lines, capacity * sizeof(*p->lines)) : NULL;
		if (!lines)
			return fail_at(p, p->line, "out of memory");
		p->lines = lines;
		p->capacity = capacity;
	}
	p->lines[p->n_members] = p->line;
	p->members[p->n_members] = (struct view_member){ 0 };
	memcpy(p->members[p->n_members++].name, name, strlen(name) + 1);
	p->keys = 0;
	return 0;
}

static const char *skip_blanks(const char *s)
{
	return s + strspn(s, " \t\r\n\f\v");
}

/* "[node NAME]", then nothing but a comment. */
static int section_begin(struct parser *p, char *text)
{
	char *close = strchr(text, ']');
	char *name, *end;

	if (section_end(p))
		return -EINVAL;
	if (!close)
		return fail_at(p, p->line, "a section without \"]\": write [node NAME]");
	if (*skip_blanks(close + 1) && !strchr(";#", *skip_blanks(close + 1)))
		return fail_at(p, p->line, "nothing but a comment may follow [node NAME]");
	*close = 0;
	text = (char *)skip_blanks(text + 1);
	if (strncmp(text, "node", 4) || (text[4] && !strchr(" \t", text[4])))
		return fail_at(p, p->line, "unknown section [%s]: write [node NAME]", text);
	name = (char *)skip_blanks(text + 4);
	for (end = name + strlen(name); end > name && strchr(" \t", end[-1]); end--)
		;
	*end = 0;
	if (!*name)
		return fail_at(p, p->line, "[node] without a name: write [node NAME]");
	return member_add(p, name);
}

/* libinih's reader: one line into buffer, without its indentation; NULL at the end, or after an error. */
static char *line_next(char *buffer, int size, void *user)
{
	struct parser *p = user;
	const char *newline;
	size_t len;

	if (p->at == p->end || p->failed)
		return NULL;
	p->line++;
	newline = memchr(p->at, '\n', (size_t)(p->end - p->at));
	len = (size_t)((newline ? newline : p->end) - p->at);
	if (len > CLUSTER_LINE_MAX || len + 1 > (size_t)size) {
		(void)fail_at(p, p->line, "a line has at most %u bytes", CLUSTER_LINE_MAX);
		return NULL;
	}
	if (memchr(p->at, 0, len)) {
		(void)fail_at(p, p->line, "a NUL byte: this is no text file");
		return NULL;
	}
	memcpy(buffer, p->at, len);
	buffer[len] = 0;
	p->at = newline ? newline + 1 : p->end;
	len = (size_t)(skip_blanks(buffer) - buffer);
	memmove(buffer, buffer + len, strlen(buffer + len) + 1);
	if (*buffer == '[') {
		if (section_begin(p, buffer))
			return NULL;
		*buffer = 0; /* libinih has no need of it */
	}
	return buffer;
}

static int parse_roles(struct parser *p, struct view_member *member, const char *value)
{
	static const struct {
		const char *name;
		uint32_t role;
	} roles[] = {
		{ "agent", ROLE_AGENT },
		{ "server", ROLE_SERVER },
	};

	for (const char *word = value; *word;) {
		size_t len = strcspn(word, ", \t"), i;

		for (i = 0; i < ARRAY_SIZE(roles); i++)
			if (strlen(roles[i].name) == len && !memcmp(roles[i].name, word, len))
				break;
		if (i == ARRAY_SIZE(roles))
			return fail_at(p, p->line,
				       "unknown role \"%.*s\": roles are agent, server, or both "
				       "with a comma between",
				       (int)len, word);
		member->roles |= roles[i].role;
		word += len;
		word += strspn(word, ", \t");
	}
	if (!member->roles)
		return fail_at(p, p->line, "no role: roles are agent, server, or both");
	return 0;
}

/* "10Gbit", "2.5Gbit", "400Mbit", in Mbit/s; 0: not such a thing. */
static uint32_t parse_rate(const char *value)
{
	static const struct {
		const char *unit;
		uint64_t kbit;
	} units[] = {
		{ "Kbit", 1 }, { "Mbit", 1000 }, { "Gbit", 1000000 }, { "Tbit", 1000000000 }
	};
	uint64_t thousandths = 0, scale = 100, mbit;
	unsigned n_digits = 0;

	for (; *value >= '0' && *value <= '9' && n_digits < 9; value++, n_digits++)
		thousandths = 10 * thousandths + 1000 * (uint64_t)(*value - '0');
	if (!n_digits)
		return 0;
	if (*value == '.')
		for (value++; *value >= '0' && *value <= '9'; value++, scale /= 10)
			thousandths += scale * (uint64_t)(*value - '0');
	value = skip_blanks(value);
	for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
		if (strcmp(units[i].unit, value))
			continue;
		mbit = thousandths * units[i].kbit / 1000000;
		return mbit >= 1 && mbit <= 10000000 ? (uint32_t)mbit : 0;
	}
	return 0;
}

static int parse_address(struct parser *p, struct view_member *member, const char *value)
{
	const char *why;

	if (member_address_check(value, &why))
		return fail_at(p, p->line, "address \"%s\": %s", value, why);
	memcpy(member->address, value, strlen(value) + 1);
	return 0;
}

static int parse_bandwidth(struct parser *p, struct view_member *member, const char *value)
{
	member->bandwidth_mbps = parse_rate(value);
	if (!member->bandwidth_mbps)
		return fail_at(
			p, p->line,
			"bandwidth \"%s\": write a number and Mbit, Gbit or Tbit, as in 25Gbit",
			value);
	return 0;
}

static const struct {
	const char *name;
	unsigned key;
	int (*parse)(struct parser *p, struct view_member *member, const char *value);
} keys[] = {
	{ "address", KEY_ADDRESS, parse_address },
	{ "roles", KEY_ROLES, parse_roles },
	{ "bandwidth", KEY_BANDWIDTH, parse_bandwidth },
};

/* libinih's handler: 0 is an error. The section it names is always empty: we took them out. */
static int on_key(void *user, const char *section, const char *name, const char *value)
{
	struct parser *p = user;
	struct view_member *member = newest(p);

	if (!member)
		return !fail_at(p, p->line, "\"%s\" stands before the first [node NAME]", name);
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		if (strcmp(keys[i].name, name))
			continue;
		if (p->keys & keys[i].key)
			return !fail_at(p, p->line, "%s is given twice for node %s", name,
					member->name);
		p->keys |= keys[i].key;
		return !keys[i].parse(p, member, value);
	}
	return !fail_at(p, p->line, "unknown key \"%s\": keys are address, roles, bandwidth", name);
}

int cluster_file_parse(const char *path, const char *text, size_t len, struct failure *failure,
		       struct view_member **ret_members, size_t *ret_n_members)
{
	_cleanup_(freep) struct view_member *members = NULL;
	struct parser p = { .path = path, .at = text, .end = text + len, .failure = failure };
	int line;

	if (len >= 3 && !memcmp(text, "\xef\xbb\xbf", 3))
		p.at += 3;
	line = ini_parse_stream(line_next, &p, on_key, &p);
	if (line > 0 && (!p.failed || (unsigned)line < p.failed_line)) {
		p.failed = false;
		(void)fail_at(&p, (unsigned)line, "neither [node NAME] nor \"key = value\"");
	}
	(void)section_end(&p);
	members = p.members;
	free(p.lines);
	if (p.failed)
		return -EINVAL;
	if (!p.n_members)
		return failure_set(failure, -EINVAL,
				   "%s: no [node NAME] in it: list every node of the cluster",
				   path);
	*ret_members = TAKE_PTR(members);
	*ret_n_members = p.n_members;
	return 0;
}

int cluster_file_read(const char *path, struct failure *failure, struct view_member **ret_members,
		      size_t *ret_n_members)
{
	_cleanup_(fd_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	_cleanup_(freep) char *text = NULL;
	struct stat st;
	size_t len = 0;
	ssize_t n;

	if (fd < 0 || fstat(fd, &st))
		return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode) || st.st_size > CLUSTER_FILE_MAX)
		return failure_set(failure, -EINVAL,
				   "%s: not a list of nodes (a plain file of at most %u bytes)",
				   path, CLUSTER_FILE_MAX);
	text = malloc((size_t)st.st_size + 1);
	if (!text)
		return failure_set(failure, -ENOMEM, "%s: out of memory", path);
	while (len < (size_t)st.st_size) {
		n = read(fd, text + len, (size_t)st.st_size - len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
		if (!n)
			break;
		len += (size_t)n;
	}
	return cluster_file_parse(path, text, len, failure, ret_members, ret_n_members);
}
