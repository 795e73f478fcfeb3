/* Counts of what schedules have met: the world notes words, scripts/sim reads the lines. */
#include "coverage.h"
#include "sim.h"

#define WORDS_MAX 512

static struct {
	const char *kind, *word;
	uint64_t n;
} words[WORDS_MAX];
static size_t n_words;

void coverage_note(const char *kind, const char *word)
{
	if (!sim_coverage)
		return;
	for (size_t i = 0; i < n_words; i++)
		if (words[i].word == word && words[i].kind == kind) {
			words[i].n++;
			return;
		}
	if (n_words == WORDS_MAX)
		return;
	words[n_words].kind = kind;
	words[n_words].word = word;
	words[n_words++].n = 1;
}

void coverage_print(void)
{
	for (size_t i = 0; i < n_words; i++)
		(void)printf("%s\t%s\t%" PRIu64 "\n", words[i].kind, words[i].word, words[i].n);
}
