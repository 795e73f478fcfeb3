/*
 * Placement: how much of a job each server should sum.
 *
 * With n nodes that push M bytes each, a server on one of them that sums the share s keeps s * M off its node's link
 * and takes in (n - 1) * s * M from the others: the link carries (1 + (n - 2) * s) * M each way. A spare server, on a
 * machine that pushes nothing, carries n * s * M. A link of bandwidth b is busy for load / b; the time of a round is
 * that of the busiest link. It is least when all links with a share are busy equally long, for a time T with
 *
 *	s = max(0, (b * T - 1) / (n - 2))	on a node of the job
 *	s = b * T / n				elsewhere
 *
 * and the shares adding up to 1. With equal links this is the optimum of OSDI'20 section 4.1: spare 2(n-1)/D, colocated
 * (n-k)/D, D = n^2 + kn - 2k. Two cases have no such T: with two nodes a colocated share costs its link nothing, so
 * spares take what they can in the time that the nodes need anyway; with one node its own server costs no link at all.
 */
#include "base/error.h"
#include "cluster/cluster.h"

/* Halvings of the interval that holds T: more than the digits of a double. */
#define SEARCH_STEPS 128
/* Shares become whole numbers of this many parts, so that dealing them out is exact. */
#define SHARE_UNIT (1ll << 40)

struct place {
	double bandwidth; /* in units of the mean */
	double share;
	bool colocated;
};

static int by_text(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Unknown bandwidths count as the mean of the known ones. */
static void places_init(struct place *places, const struct placement_server *servers, size_t n)
{
	double sum = 0, mean;
	size_t n_known = 0;

	for (size_t i = 0; i < n; i++) {
		sum += servers[i].bandwidth_mbps;
		n_known += servers[i].bandwidth_mbps > 0;
		places[i].colocated = servers[i].colocated;
	}
	mean = n_known ? sum / (double)n_known : 1;
	for (size_t i = 0; i < n; i++) {
		uint32_t mbps = servers[i].bandwidth_mbps;

		places[i].bandwidth = mbps ? mbps / mean : 1;
	}
}

static double share_at(const struct place *place, double time, size_t n_agents)
{
	double share;

	if (!place->colocated)
		return place->bandwidth * time / (double)n_agents;
	share = (place->bandwidth * time - 1) / (double)(n_agents - 2);
	return share > 0 ? share : 0;
}

static double shares_at(struct place *places, size_t n, double time, size_t n_agents)
{
	double sum = 0;

	for (size_t i = 0; i < n; i++) {
		places[i].share = share_at(&places[i], time, n_agents);
		sum += places[i].share;
	}
	return sum;
}

/* More than two nodes. The sum of the shares grows with T: find where it is 1. */
static void shares_balance(struct place *places, size_t n, size_t n_agents)
{
	double low = 0, high = 1;

	while (shares_at(places, n, high, n_agents) < 1)
		high *= 2;
	for (unsigned step = 0; step < SEARCH_STEPS; step++) {
		double middle = low + (high - low) / 2;

		if (shares_at(places, n, middle, n_agents) < 1)
			low = middle;
		else
			high = middle;
	}
	(void)shares_at(places, n, high, n_agents);
}

static double bandwidth_of(const struct place *places, size_t n, bool colocated)
{
	double sum = 0;

	for (size_t i = 0; i < n; i++) {
		if (places[i].colocated == colocated)
			sum += places[i].bandwidth;
	}
	return sum;
}

/* Two nodes or one: spares take spare_share in all, the rest stays with the nodes' own servers. */
static void shares_few(struct place *places, size_t n, size_t n_agents)
{
	double own = bandwidth_of(places, n, true), spare = bandwidth_of(places, n, false);
	double spare_share = 0, time = 1;

	for (size_t i = 0; i < n; i++) {
		if (places[i].colocated)
			time = MAX(time, 1 / places[i].bandwidth);
	}
	if (n_agents == 2)
		spare_share = MIN(spare * time / 2, 1.0);
	if (own <= 0)
		spare_share = 1;
	for (size_t i = 0; i < n; i++) {
		if (places[i].colocated)
			places[i].share = (1 - spare_share) * places[i].bandwidth / own;
		else
			places[i].share = spare_share * places[i].bandwidth / spare;
	}
}

/* A server that is given stripes. All of them are gone through for each stripe, so they are kept small. */
struct dealt {
	int64_t weight, credit;
	size_t server;
};

/*
 * Smooth weighted round robin: every server earns its weight at each step, the richest gets the stripe and pays for it.
 * After any number of steps each has had its share to within one stripe or so.
 */
static int assign(const struct place *places, size_t n, uint16_t *stripes, size_t n_stripes)
{
	_cleanup_(freep) struct dealt *dealt = calloc(n, sizeof(*dealt));
	size_t n_dealt = 0;
	int64_t sum = 0;

	if (!dealt)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		int64_t weight = (int64_t)(places[i].share * (double)SHARE_UNIT);

		sum += weight;
		if (weight)
			dealt[n_dealt++] = (struct dealt){ .weight = weight, .server = i };
	}
	for (size_t s = 0; s < n_stripes; s++) {
		int64_t most = INT64_MIN;
		size_t richest = 0;

		for (size_t i = 0; i < n_dealt; i++) {
			int64_t credit = dealt[i].credit += dealt[i].weight;

			if (credit > most) {
				most = credit;
				richest = i;
			}
		}
		dealt[richest].credit -= sum;
		stripes[s] = (uint16_t)dealt[richest].server;
	}
	return 0;
}

int placement_assign(const struct placement_server *servers, size_t n, size_t n_agents,
		     uint16_t *stripes, size_t n_stripes)
{
	_cleanup_(freep) struct place *places = NULL;

	if (!n || n > UINT16_MAX)
		return error_origin(-ENOENT);
	places = calloc(n, sizeof(*places));
	if (!places)
		return error_origin(-ENOMEM);

	places_init(places, servers, n);
	if (n_agents > 2)
		shares_balance(places, n, n_agents);
	else
		shares_few(places, n, MAX(n_agents, (size_t)1));
	return error_trace(assign(places, n, stripes, n_stripes));
}

/* The names among them, sorted: each of many servers is looked for there. Returns how many. */
static size_t sort_agents(const char *const *agents, size_t n_agents, const char **ret_sorted)
{
	size_t n = 0;

	for (size_t i = 0; i < n_agents; i++)
		if (agents[i])
			ret_sorted[n++] = agents[i];
	qsort(ret_sorted, n, sizeof(*ret_sorted), by_text);
	return n;
}

int placement_stripes(const struct view *view, const char *const *agents, size_t n_agents,
		      uint16_t *stripes, size_t n_stripes)
{
	size_t n = view_n_servers(view), n_named, at = 0;
	_cleanup_(freep) struct placement_server *servers =
		calloc(MAX(n, (size_t)1), sizeof(*servers));
	_cleanup_(freep) const char **sorted = calloc(MAX(n_agents, (size_t)1), sizeof(*sorted));
	const struct view_member *server = NULL;

	if (!servers || !sorted)
		return error_origin(-ENOMEM);
	n_named = sort_agents(agents, n_agents, sorted);
	while ((server = view_next_server(view, server))) {
		const char *name = server->name;

		servers[at++] = (struct placement_server){
			.bandwidth_mbps = server->bandwidth_mbps,
			.colocated = bsearch(&name, sorted, n_named, sizeof(*sorted), by_text),
		};
	}
	return error_trace(placement_assign(servers, n, n_agents, stripes, n_stripes));
}
