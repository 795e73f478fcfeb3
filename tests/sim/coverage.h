/* What the schedules of this process have met: words of a kind, and how often. */
#pragma once

void coverage_note(const char *kind, const char *word);
/* Prints what was met, as lines "kind word count". */
void coverage_print(void);
