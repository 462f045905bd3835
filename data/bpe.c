/* bpe.c - text to the tokens of a byte-level BPE.
 *
 * In: text.  Out: ids. Text is split into pieces by the pattern; within a piece, the adjacent pair of lowest
 * rank is merged (the leftmost among equals) until none merges.
 * Invariants: pieces cover the text; the short and the long method give the same ids; an encoder
 * belongs to one thread. */
#include "data/bpe.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "data/utf8.h"

/* Up to this many bytes a scan for the lowest rank beats a heap. */
enum { SHORT_PIECE = 128 };
/* Text that is worth making a cache for. */
enum { CACHE_WORTH_BYTES = 1 << 15 };
enum { CACHE_SLOTS = 1 << 15, CACHE_TEXT = 22, CACHE_IDS = 10 };

/* One cache line: words repeat, and most have few tokens. */
typedef struct {
    uint8_t bytes, n; /* bytes 0: empty */
    char text[CACHE_TEXT];
    int32_t ids[CACHE_IDS];
} CacheEntry;
_Static_assert(sizeof(CacheEntry) == 64, "one cache line");

/* A symbol of a long piece: linked to its neighbours, -1 at the ends. */
typedef struct {
    int32_t id; /* -1: merged into the one before */
    int32_t previous, next;
} Symbol;

/* A pair that may merge; stale when its symbols have changed since. */
typedef struct {
    int32_t rank, at; /* at: index of the left symbol */
    int32_t left, right;
} Candidate;

struct BpeEncoder {
    const Bpe *bpe;
    CacheEntry *cache; /* NULL until there was text enough to be worth its two megabytes */
    size_t text_bytes; /* encoded so far */
    pcre2_match_data *match;
    Symbol *symbols;
    Candidate *heap;
    size_t symbol_room, n_heap, heap_room;
    int64_t repaired;
};

BpeEncoder *bpe_encoder_create(const Bpe *bpe) {
    BpeEncoder *encoder = xcalloc(1, sizeof *encoder);
    encoder->bpe = bpe;
    encoder->match = pcre2_match_data_create(1, NULL);
    REQUIRE(encoder->match);
    return encoder;
}

void bpe_encoder_free(BpeEncoder *encoder) {
    if (!encoder) return;
    pcre2_match_data_free(encoder->match);
    free(encoder->cache);
    free(encoder->symbols);
    free(encoder->heap);
    free(encoder);
}

int64_t bpe_encoder_repaired(const BpeEncoder *encoder) { return encoder->repaired; }

static void append(int32_t **ids, int64_t *n, int64_t *capacity, const int32_t *from, int64_t count) {
    if (*n + count > *capacity) {
        *capacity = 2 * (*n + count) + 64;
        *ids = xrealloc(*ids, (uint64_t)*capacity * sizeof **ids);
    }
    memcpy(*ids + *n, from, (size_t)count * sizeof **ids);
    *n += count;
}

/* ---- one piece ---- */

static int32_t rank_of(const Bpe *bpe, int32_t left, int32_t right, int32_t *result) {
    const BpeMerge *merge = bpe_merge(bpe, left, right);
    if (!merge) return INT32_MAX;
    *result = merge->result;
    return merge->rank;
}

/* bytes <= SHORT_PIECE; ids has that room. Returns how many. */
static int64_t encode_short_piece(const Bpe *bpe, const char *piece, size_t bytes, int32_t *ids) {
    int32_t ranks[SHORT_PIECE], results[SHORT_PIECE] = {0};
    int64_t n = (int64_t)bytes;
    for (int64_t i = 0; i < n; i++) ids[i] = bpe->byte_id[(unsigned char)piece[i]];
    for (int64_t i = 0; i + 1 < n; i++) ranks[i] = rank_of(bpe, ids[i], ids[i + 1], &results[i]);
    while (n > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < n; i++) {
            if (ranks[i] < ranks[best]) best = i;
        }
        if (ranks[best] == INT32_MAX) break;
        ids[best] = results[best];
        n--;
        for (int64_t i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            ranks[i] = ranks[i + 1]; /* the last one is never looked at */
            results[i] = results[i + 1];
        }
        if (best > 0) ranks[best - 1] = rank_of(bpe, ids[best - 1], ids[best], &results[best - 1]);
        if (best + 1 < n) ranks[best] = rank_of(bpe, ids[best], ids[best + 1], &results[best]);
    }
    return n;
}

static bool candidate_before(Candidate a, Candidate b) { return a.rank != b.rank ? a.rank < b.rank : a.at < b.at; }

/* Adds the pair at symbol `at` where it merges. */
static void heap_add(BpeEncoder *encoder, int32_t at) {
    if (at < 0 || encoder->symbols[at].next < 0) return;
    int32_t left = encoder->symbols[at].id, right = encoder->symbols[encoder->symbols[at].next].id;
    const BpeMerge *merge = bpe_merge(encoder->bpe, left, right);
    if (!merge) return;
    if (encoder->n_heap == encoder->heap_room) {
        encoder->heap_room = 2 * encoder->heap_room + 1024;
        encoder->heap = xrealloc(encoder->heap, encoder->heap_room * sizeof *encoder->heap);
    }
    Candidate added = {merge->rank, at, left, right};
    size_t slot = encoder->n_heap++;
    while (slot > 0 && candidate_before(added, encoder->heap[(slot - 1) / 2])) {
        encoder->heap[slot] = encoder->heap[(slot - 1) / 2];
        slot = (slot - 1) / 2;
    }
    encoder->heap[slot] = added;
}

static Candidate heap_take(BpeEncoder *encoder) {
    Candidate top = encoder->heap[0], last = encoder->heap[--encoder->n_heap];
    size_t slot = 0;
    for (;;) {
        size_t child = 2 * slot + 1;
        if (child >= encoder->n_heap) break;
        if (child + 1 < encoder->n_heap && candidate_before(encoder->heap[child + 1], encoder->heap[child])) child++;
        if (!candidate_before(encoder->heap[child], last)) break;
        encoder->heap[slot] = encoder->heap[child];
        slot = child;
    }
    encoder->heap[slot] = last;
    return top;
}

void bpe_encode_long_piece(BpeEncoder *encoder, const char *piece, size_t bytes, int32_t **ids, int64_t *n,
                           int64_t *capacity) {
    REQUIRE(bytes > 0 && bytes < INT32_MAX);
    if (bytes > encoder->symbol_room) {
        encoder->symbol_room = bytes;
        encoder->symbols = xrealloc(encoder->symbols, bytes * sizeof *encoder->symbols);
    }
    Symbol *symbols = encoder->symbols;
    int32_t count = (int32_t)bytes;
    for (int32_t i = 0; i < count; i++) {
        symbols[i] = (Symbol){encoder->bpe->byte_id[(unsigned char)piece[i]], i - 1, i + 1 < count ? i + 1 : -1};
    }
    encoder->n_heap = 0;
    for (int32_t i = 0; i < count; i++) heap_add(encoder, i);
    while (encoder->n_heap > 0) {
        Candidate best = heap_take(encoder);
        int32_t right = symbols[best.at].next;
        if (symbols[best.at].id != best.left || right < 0 || symbols[right].id != best.right) continue;
        symbols[best.at].id = bpe_merge(encoder->bpe, best.left, best.right)->result;
        symbols[best.at].next = symbols[right].next;
        if (symbols[right].next >= 0) symbols[symbols[right].next].previous = best.at;
        symbols[right].id = -1;
        heap_add(encoder, symbols[best.at].previous);
        heap_add(encoder, best.at);
    }
    for (int32_t i = 0; i >= 0; i = symbols[i].next) append(ids, n, capacity, &symbols[i].id, 1);
}

static void encode_piece(BpeEncoder *encoder, const char *piece, size_t bytes, int32_t **ids, int64_t *n,
                         int64_t *capacity) {
    if (bytes > SHORT_PIECE) {
        bpe_encode_long_piece(encoder, piece, bytes, ids, n, capacity);
        return;
    }
    CacheEntry *entry = NULL;
    if (encoder->cache && bytes <= CACHE_TEXT) {
        entry = &encoder->cache[XXH3_64bits(piece, bytes) % CACHE_SLOTS];
        if (entry->bytes == bytes && memcmp(entry->text, piece, bytes) == 0) {
            append(ids, n, capacity, entry->ids, entry->n);
            return;
        }
    }
    int32_t found[SHORT_PIECE];
    int64_t count = encode_short_piece(encoder->bpe, piece, bytes, found);
    append(ids, n, capacity, found, count);
    if (!entry || count > CACHE_IDS) return;
    entry->bytes = (uint8_t)bytes;
    entry->n = (uint8_t)count;
    memcpy(entry->text, piece, bytes);
    memcpy(entry->ids, found, (size_t)count * sizeof *found);
}

/* ---- text ---- */

void bpe_encode(BpeEncoder *encoder, const char *text, size_t bytes, int32_t **ids, int64_t *n, int64_t *capacity) {
    char *repaired = NULL;
    if (utf8_valid_prefix(text, bytes) != bytes) {
        int64_t replaced;
        repaired = utf8_repair(text, bytes, &bytes, &replaced);
        text = repaired;
        encoder->repaired += replaced;
    }
    encoder->text_bytes += bytes;
    if (!encoder->cache && encoder->text_bytes > CACHE_WORTH_BYTES) {
        encoder->cache = xcalloc(CACHE_SLOTS, sizeof *encoder->cache);
    }
    for (size_t at = 0; at < bytes;) {
        int rc = pcre2_match(encoder->bpe->pattern, (PCRE2_SPTR)text, bytes, at, PCRE2_NO_UTF_CHECK, encoder->match,
                             NULL);
        if (rc < 0) die(EXIT_INTERNAL, "PCRE2 cannot split the text at byte %zu of %zu (error %d)", at, bytes, rc);
        size_t end = pcre2_get_ovector_pointer(encoder->match)[1];
        REQUIRE(end > at);
        encode_piece(encoder, text + at, end - at, ids, n, capacity);
        at = end;
    }
    free(repaired);
}

/* ---- where a long text may be cut ---- */

typedef enum { CLASS_SPACE, CLASS_LETTER, CLASS_NUMBER, CLASS_OTHER } CharClass;

static bool is_space(int32_t code) {
    return (code >= 9 && code <= 13) || code == 32 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
           code == 0x3000;
}

/* Of the character at text, valid or not: what is invalid becomes U+FFFD, which is none of the first three. */
static CharClass class_of(BpeEncoder *encoder, const char *text, size_t length, int32_t code) {
    if (code < 0) return CLASS_OTHER;
    if (is_space(code)) return CLASS_SPACE;
    void *const patterns[] = {encoder->bpe->letter, encoder->bpe->number};
    for (int i = 0; i < 2; i++) {
        if (pcre2_match(patterns[i], (PCRE2_SPTR)text, length, 0, PCRE2_NO_UTF_CHECK, encoder->match, NULL) > 0) {
            return i == 0 ? CLASS_LETTER : CLASS_NUMBER;
        }
    }
    return CLASS_OTHER;
}

/* Of the character that ends before `end`. */
static CharClass class_before(BpeEncoder *encoder, const char *text, size_t end) {
    for (size_t length = 1; length <= 4 && length <= end; length++) {
        int32_t code;
        if (utf8_decode(text + end - length, length, &code) == length && code >= 0) {
            return class_of(encoder, text + end - length, length, code);
        }
    }
    return CLASS_OTHER;
}

/* A run of letters or of numbers ends where another class begins, and anything but space ends before space:
 * no piece crosses such a place, and none before it depends on what follows. (After other characters that
 * does not hold before letters, because of 's and the like, nor inside white space.) */
static bool cut_is_safe(CharClass before, CharClass after) {
    if (before == CLASS_LETTER || before == CLASS_NUMBER) return after != before;
    return before == CLASS_OTHER && after == CLASS_SPACE;
}

size_t bpe_safe_cut(BpeEncoder *encoder, const char *text, size_t bytes) {
    for (size_t at = bytes > 0 ? bytes - 1 : 0; at > 0; at--) {
        if ((text[at] & 0xC0) == 0x80) continue;
        int32_t code;
        size_t length = utf8_decode(text + at, bytes - at, &code);
        if (code < 0 && at + length == bytes) continue; /* not all of it is here */
        CharClass after = class_of(encoder, text + at, length, code);
        if (cut_is_safe(class_before(encoder, text, at), after)) return at;
    }
    return 0;
}
