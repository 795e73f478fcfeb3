/* Which jobs of the agent and of the server are one. report.c makes tables with it, and counts. */
#include "job_lines.h"

#include "base/error.h"

int job_lines_init(struct job_lines *lines, size_t n_max)
{
	*lines = (struct job_lines){ .lines = calloc(n_max + 1, sizeof(lines->lines[0])) };
	return lines->lines ? 0 : error_origin(-ENOMEM);
}

void job_lines_done(struct job_lines *lines)
{
	map_done(&lines->by_number);
	map_done(&lines->by_name);
	map_done(&lines->unnumbered);
	free(lines->lines);
}

static struct job_line *find_number(const struct job_lines *lines, uint64_t number)
{
	struct map_entry *entry = number ? map_find(&lines->by_number, number) : NULL;

	return entry ? container_of(entry, struct job_line, by_number) : NULL;
}

static struct job_line *find_name(const struct job_lines *lines, const char *name, uint64_t hash)
{
	struct map_entry *entry = map_find(&lines->by_name, hash);

	for (; entry; entry = map_find_next(entry)) {
		struct job_line *line = container_of(entry, struct job_line, by_name);

		if (!strcmp(line->name, name))
			return line;
	}
	return NULL;
}

static struct job_line *find_unnumbered(const struct job_lines *lines, const char *name,
					uint64_t hash)
{
	struct map_entry *entry = map_find(&lines->unnumbered, hash);

	for (; entry; entry = map_find_next(entry)) {
		struct job_line *line = container_of(entry, struct job_line, unnumbered);

		if (!strcmp(line->name, name))
			return line;
	}
	return NULL;
}

static int add(struct job_lines *lines, const char *name, uint64_t number, size_t *ret_line)
{
	struct job_line *line = &lines->lines[lines->n];
	uint64_t hash = map_hash_string(name);
	int r = 0;

	*line = (struct job_line){ .name = name, .number = number };
	if (number && !find_number(lines, number))
		r = map_add(&lines->by_number, number, &line->by_number);
	if (!r && !find_name(lines, name, hash))
		r = map_add(&lines->by_name, hash, &line->by_name);
	if (!r && !number && !find_unnumbered(lines, name, hash))
		r = map_add(&lines->unnumbered, hash, &line->unnumbered);
	if (r)
		return error_trace(r);
	*ret_line = lines->n++;
	return 0;
}

/* Where each rank is a node of its own, those of this daemon are apart in the agent. */
int job_lines_agent(struct job_lines *lines, const char *name, uint64_t number, size_t *ret_line)
{
	const struct job_line *line = find_number(lines, number);

	if (!line)
		return add(lines, name, number, ret_line);
	*ret_line = (size_t)(line - lines->lines);
	return 0;
}

int job_lines_server(struct job_lines *lines, const char *name, uint64_t number, size_t *ret_line)
{
	uint64_t hash = map_hash_string(name);
	const struct job_line *line = find_number(lines, number);
	const struct job_line *named =
		number ? find_unnumbered(lines, name, hash) : find_name(lines, name, hash);

	if (!line || (named && named < line))
		line = named;
	if (!line)
		return add(lines, name, number, ret_line);
	*ret_line = (size_t)(line - lines->lines);
	return 0;
}
