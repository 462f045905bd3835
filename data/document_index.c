/* document_index.c - where documents begin in a packed stream, held in 4 bytes a document.
 *
 * In: first tokens, in order.  Out: the document of a token by binary search.
 * Invariant: low[before_high[h] .. before_high[h + 1]) are the low halves of the positions whose high
 * half is h, and non-decreasing within it. All positions are 64 bits: a corpus of 10^12 tokens has 233
 * high halves. */
#include <stdlib.h>

#include "data/token_file.h"

void document_index_begin(DocumentIndex *index, int64_t documents, int64_t tokens) {
    *index = (DocumentIndex){.documents = documents, .highs = (tokens >> 32) + 1};
    index->low = xmalloc((uint64_t)documents * sizeof *index->low);
    index->before_high = xcalloc((uint64_t)index->highs + 1, sizeof *index->before_high);
}

void document_index_add(DocumentIndex *index, int64_t *n_added, int64_t position) {
    REQUIRE(*n_added < index->documents && position >> 32 < index->highs);
    index->low[(*n_added)++] = (uint32_t)position;
    index->before_high[(position >> 32) + 1] = *n_added;
}

void document_index_end(DocumentIndex *index, int64_t n_added) {
    REQUIRE(n_added == index->documents);
    for (int64_t h = 1; h <= index->highs; h++) { /* high halves in which no document begins */
        if (index->before_high[h] < index->before_high[h - 1]) index->before_high[h] = index->before_high[h - 1];
    }
}

int64_t document_index_start(const DocumentIndex *index, int64_t d) {
    REQUIRE(d >= 0 && d < index->documents);
    int64_t low = 0, high = index->highs - 1;
    while (low < high) { /* the first h with before_high[h + 1] > d */
        int64_t middle = low + (high - low) / 2;
        if (index->before_high[middle + 1] > d) high = middle;
        else low = middle + 1;
    }
    return low << 32 | index->low[d];
}

int64_t document_index_find(const DocumentIndex *index, int64_t position) {
    int64_t h = position >> 32;
    REQUIRE(position >= 0 && h < index->highs);
    int64_t low = index->before_high[h], high = index->before_high[h + 1];
    while (low < high) { /* the first document whose low half is above position's */
        int64_t middle = low + (high - low) / 2;
        if (index->low[middle] > (uint32_t)position) high = middle;
        else low = middle + 1;
    }
    return low - 1;
}

void document_index_free(DocumentIndex *index) {
    free(index->low);
    free(index->before_high);
    *index = (DocumentIndex){0};
}
