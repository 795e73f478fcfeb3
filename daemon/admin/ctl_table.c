/*
 * What bpsctl prints for people: a reply of each kind as lines and tables. Text of other
 * processes is made harmless to a terminal first. ctl.c calls the function that goes with its
 * command, or ctl_json.c's for programs.
 */
#include "admin/ctl.h"
#include "proto/admin.pb-c.h"
#include "proto/health.pb-c.h"
#include "proto/text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define CELL_MAX    320
#define COLUMNS_MAX 12

/* Text from elsewhere, harmless to a terminal. */
static void clean(char *text)
{
	text_make_plain(text, strlen(text));
}

/*
 * A table whose columns are as wide as their widest cell. A cell that is a number is aligned to the
 * right.
 */
struct table {
	size_t n_columns, n_rows, capacity;
	char (*cells)[CELL_MAX]; /* row by row, the headings first */
	size_t at;
	bool failed;
};

static void table_done(struct table *table)
{
	free(table->cells);
}

static void _printf_(2, 3) cell(struct table *table, const char *format, ...)
{
	va_list args;

	if (table->at == table->capacity) {
		size_t capacity = table->capacity ? 2 * table->capacity : 64;
		void *cells = realloc(table->cells, capacity * CELL_MAX);

		if (!cells) {
			table->failed = true;
			return;
		}
		table->cells = cells;
		table->capacity = capacity;
	}
	va_start(args, format);
	(void)vsnprintf(table->cells[table->at], CELL_MAX, format, args);
	va_end(args);
	clean(table->cells[table->at++]);
}

static void table_init(struct table *table, const char *const *headings, size_t n_columns)
{
	*table = (struct table){ .n_columns = n_columns };
	for (size_t i = 0; i < n_columns; i++)
		cell(table, "%s", headings[i]);
}

static bool numeric(const char *text)
{
	return *text >= '0' && *text <= '9' && !strchr(text, ':') && !strchr(text, ',');
}

static void table_print(const struct table *table)
{
	size_t widths[COLUMNS_MAX] = { 0 }, n_rows = table->at / table->n_columns;
	bool right[COLUMNS_MAX] = { false };

	if (table->failed) {
		fprintf(stderr, "bpsctl: out of memory\n");
		return;
	}
	for (size_t i = 0; i < n_rows * table->n_columns; i++) {
		size_t column = i % table->n_columns;

		widths[column] = MAX(widths[column], strlen(table->cells[i]));
		if (i >= table->n_columns && numeric(table->cells[i]))
			right[column] = true;
	}
	for (size_t i = 0; i < n_rows * table->n_columns; i++) {
		size_t column = i % table->n_columns;
		bool last = column + 1 == table->n_columns;
		int width = last && !right[column] ? 0 : (int)widths[column];

		printf("%*s%s", right[column] ? width : -width, table->cells[i],
		       last ? "\n" : "  ");
	}
}

/* 1536 -> "1.5K"; what is below 1000 is exact. */
static const char *size_text(uint64_t bytes, char text[16])
{
	static const char units[] = "KMGTPE";
	double value = (double)bytes;
	size_t unit = 0;

	if (bytes < 1000) {
		(void)snprintf(text, 16, "%" PRIu64, bytes);
		return text;
	}
	for (value /= 1024; value >= 999.95 && unit + 2 < sizeof(units); value /= 1024)
		unit++;
	(void)snprintf(text, 16, "%.1f%c", value, units[unit]);
	return text;
}

static const char *roles_text(uint32_t roles, char text[48])
{
	static const char *const names[] = { "agent", "server", "coordinator" };

	*text = 0;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (!(roles & 1u << i))
			continue;
		if (*text)
			(void)strcat(text, ",");
		(void)strcat(text, names[i]);
	}
	return *text ? text : "none";
}

static const char *duration_text(uint64_t ms, char text[32])
{
	uint64_t s = ms / 1000;

	if (s >= 86400)
		(void)snprintf(text, 32, "%" PRIu64 " d %" PRIu64 " h", s / 86400, s / 3600 % 24);
	else if (s >= 3600)
		(void)snprintf(text, 32, "%" PRIu64 " h %" PRIu64 " min", s / 3600, s / 60 % 60);
	else if (s >= 60)
		(void)snprintf(text, 32, "%" PRIu64 " min %" PRIu64 " s", s / 60, s % 60);
	else
		(void)snprintf(text, 32, "%.1f s", (double)ms / 1000);
	return text;
}

static void _printf_(2, 3) line(const char *name, const char *format, ...)
{
	char text[512];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	clean(text);
	printf("%-12s %s\n", name, text);
}

void ctl_print_status(const ProtobufCMessage *reply)
{
	const Bps__Admin__StatusReply *status = (const Bps__Admin__StatusReply *)reply;
	char roles[48], uptime[32], in[16], out[16], held[16];

	line("node", "%s", status->node);
	line("state", "%s", status->state);
	line("roles", "%s", roles_text(status->roles, roles));
	line("cluster", "%s, view %u", status->source, status->epoch);
	line("software", "%s", status->software);
	line("id", "%016" PRIx64, status->id);
	line("up", "%s", duration_text(status->uptime_ms, uptime));
	line("sessions", "%u", status->n_sessions);
	line("jobs", "%u", status->n_jobs);
	line("requests", "%" PRIu64 " done, %" PRIu64 " of them failed", status->n_requests,
	     status->n_failed);
	if (status->exposed)
		line("exposed", "%s", status->exposed);
	line("received", "%s", size_text(status->bytes_in, in));
	line("sent", "%s", size_text(status->bytes_out, out));
	line("held", "%s", size_text(status->bytes_held, held));
}

void ctl_print_nodes(const ProtobufCMessage *reply)
{
	static const char *const headings[] = { "NODE",	    "ROLES", "ADDRESS", "LINK",
						"RECEIVED", "SENT",  "MBIT/S",	"BY" };
	const Bps__Admin__NodesReply *nodes = (const Bps__Admin__NodesReply *)reply;
	_cleanup_(table_done) struct table table;
	char roles[48], in[16], out[16];

	table_init(&table, headings, ARRAY_SIZE(headings));
	for (size_t i = 0; i < nodes->n_nodes; i++) {
		const Bps__Admin__Node *node = nodes->nodes[i];

		cell(&table, "%s", node->name);
		cell(&table, "%s", roles_text(node->roles, roles));
		cell(&table, "%s", *node->address ? node->address : "-");
		cell(&table, "%s", node->link);
		cell(&table, "%s", size_text(node->bytes_in, in));
		cell(&table, "%s", size_text(node->bytes_out, out));
		if (node->bandwidth_mbps)
			cell(&table, "%u", node->bandwidth_mbps);
		else
			cell(&table, "-");
		cell(&table, "%s", node->transport ?: "-");
	}
	printf("view %u, %zu node%s\n", nodes->epoch, nodes->n_nodes,
	       nodes->n_nodes == 1 ? "" : "s");
	table_print(&table);
}

static void jobs_table(Bps__Admin__JobSummary *const *jobs, size_t n)
{
	static const char *const headings[] = { "JOB",	     "STATE",	   "ROLE",   "RANKS",
						"NODES",     "LOCAL",	   "ROUNDS", "BYTES",
						"IN FLIGHT", "WAITING FOR" };
	_cleanup_(table_done) struct table table;
	char bytes[16];

	table_init(&table, headings, ARRAY_SIZE(headings));
	for (size_t i = 0; i < n; i++) {
		const Bps__Admin__JobSummary *job = jobs[i];

		cell(&table, "%s", job->job);
		cell(&table, "%s", job->state);
		cell(&table, "%s", job->role);
		cell(&table, "%u", job->size);
		cell(&table, "%u", job->n_nodes);
		cell(&table, "%u", job->n_local);
		cell(&table, "%" PRIu64, job->rounds);
		cell(&table, "%s", size_text(job->bytes, bytes));
		cell(&table, "%" PRIu64, job->in_flight);
		cell(&table, "%s", job->waiting_for ? job->waiting_for : "-");
	}
	table_print(&table);
}

void ctl_print_jobs(const ProtobufCMessage *reply)
{
	const Bps__Admin__JobsReply *jobs = (const Bps__Admin__JobsReply *)reply;

	if (jobs->n_jobs)
		jobs_table(jobs->jobs, jobs->n_jobs);
	else
		printf("no jobs\n");
}

static void ranks_table(Bps__Admin__Rank *const *ranks, size_t n)
{
	static const char *const headings[] = { "RANK",	    "NODE",    "STATE", "PID",
						"REQUESTS", "PENDING", "HELD",	"REGIONS" };
	_cleanup_(table_done) struct table table;
	char held[16];

	table_init(&table, headings, ARRAY_SIZE(headings));
	for (size_t i = 0; i < n; i++) {
		const Bps__Admin__Rank *rank = ranks[i];

		cell(&table, "%u", rank->rank);
		cell(&table, "%u", rank->node);
		cell(&table, "%s", rank->state);
		if (!rank->has_pid) {
			for (int column = 0; column < 5; column++)
				cell(&table, "-");
			continue;
		}
		cell(&table, "%u", rank->pid);
		cell(&table, "%" PRIu64, rank->requests);
		cell(&table, "%" PRIu64, rank->pending);
		cell(&table, "%s", size_text(rank->bytes_held, held));
		cell(&table, "%u", rank->regions);
	}
	table_print(&table);
}

static void servers_table(Bps__Admin__JobServer *const *servers, size_t n)
{
	static const char *const headings[] = { "SERVER", "ADDRESS", "STATE", "SHARE", "" };
	_cleanup_(table_done) struct table table;

	table_init(&table, headings, ARRAY_SIZE(headings));
	for (size_t i = 0; i < n; i++) {
		const Bps__Admin__JobServer *server = servers[i];

		cell(&table, "%s", server->name);
		cell(&table, "%s", server->address);
		cell(&table, "%s", server->state);
		cell(&table, "%.1f %%", server->share / 10.0);
		cell(&table, "%s", server->added ? "added" : "");
	}
	table_print(&table);
}

static void arrivals_table(Bps__Admin__Arrival *const *arrivals, size_t n)
{
	static const char *const headings[] = {
		"WHO", "ROUNDS", "LAST", "BEHIND", "WAITED FOR", ""
	};
	_cleanup_(table_done) struct table table;

	table_init(&table, headings, ARRAY_SIZE(headings));
	for (size_t i = 0; i < n; i++) {
		const Bps__Admin__Arrival *arrival = arrivals[i];

		cell(&table, "%s", arrival->who);
		cell(&table, "%" PRIu64, arrival->rounds);
		cell(&table, "%" PRIu64, arrival->last);
		cell(&table, "%.1f ms", (double)arrival->late_us / 1000);
		cell(&table, "%.1f s", (double)arrival->held_ms / 1000);
		cell(&table, "%s", arrival->is_late ? "late" : "");
	}
	table_print(&table);
}

static void tensors_table(Bps__Admin__TensorInfo *const *tensors, size_t n)
{
	static const char *const headings[] = { "TENSOR", "KEY",    "TYPE", "ELEMENTS",
						"ROUNDS", "SPREAD", "LAST", "WAITING FOR" };
	_cleanup_(table_done) struct table table;

	table_init(&table, headings, ARRAY_SIZE(headings));
	for (size_t i = 0; i < n; i++) {
		const Bps__Admin__TensorInfo *tensor = tensors[i];

		cell(&table, "%s", tensor->name);
		cell(&table, "%" PRIu64, tensor->key);
		cell(&table, "%s", tensor->dtype);
		if (tensor->elements == UINT64_MAX)
			cell(&table, "varying");
		else
			cell(&table, "%" PRIu64, tensor->elements);
		cell(&table, "%" PRIu64, tensor->rounds);
		if (tensor->has_spread_us)
			cell(&table, "%.1f ms", (double)tensor->spread_us / 1000);
		else
			cell(&table, "-");
		cell(&table, "%s", tensor->last ?: "-");
		cell(&table, "%s", tensor->waiting_for ? tensor->waiting_for : "-");
	}
	table_print(&table);
}

void ctl_print_job(const ProtobufCMessage *reply)
{
	const Bps__Admin__JobReply *job = (const Bps__Admin__JobReply *)reply;
	Bps__Admin__JobSummary *summary = job->summary;

	jobs_table(&summary, 1);
	if (summary->ends)
		printf("It ends with this daemon's process: %s.\n", summary->ends);
	if (summary->gpu)
		printf("GPU memory goes to servers and back %s.\n", summary->gpu);
	if (job->n_ranks) {
		printf("\n");
		ranks_table(job->ranks, job->n_ranks);
	}
	if (job->n_servers) {
		printf("\n");
		servers_table(job->servers, job->n_servers);
	}
	if (job->n_arrivals) {
		printf("\n");
		arrivals_table(job->arrivals, job->n_arrivals);
	}
	if (job->n_tensors) {
		printf("\n");
		tensors_table(job->tensors, job->n_tensors);
	}
	if (job->total_tensors > job->n_tensors)
		printf("and %" PRIu64 " more tensors\n", job->total_tensors - job->n_tensors);
}

void ctl_print_metrics(const ProtobufCMessage *reply)
{
	(void)fputs(((const Bps__Admin__MetricsReply *)reply)->text, stdout);
}

void ctl_print_health(const ProtobufCMessage *reply)
{
	const Grpc__Health__V1__HealthCheckResponse *health =
		(const Grpc__Health__V1__HealthCheckResponse *)reply;
	bool serving =
		health->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;

	printf("%s\n", serving ? "serving" : "not serving");
}

void ctl_print_drain(const ProtobufCMessage *reply)
{
	const Bps__Admin__DrainReply *drain = (const Bps__Admin__DrainReply *)reply;

	printf("%u jobs moved to other servers, %u stay\n", drain->moved, drain->stay);
}
