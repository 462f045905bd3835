/* token_file.h - what the readers of the two formats share. Private to data/.
 *
 * A token file is a packed stream of tokens: one or more segments (the .bin of a Megatron pair, or
 * the shards of llm.c in order), each read with pread from a descriptor that stays open. Nothing is
 * mapped: a file that shrinks under us is an error with a name, not a signal. */
#ifndef TRIDENT_DATA_TOKEN_FILE_H
#define TRIDENT_DATA_TOKEN_FILE_H

#include "data/source.h"

/* Type codes of the .idx header; llm.c's u32 has no code there. */
typedef enum {
    TOKEN_U8 = 1,
    TOKEN_I8 = 2,
    TOKEN_I16 = 3,
    TOKEN_I32 = 4,
    TOKEN_I64 = 5,
    TOKEN_F64 = 6,
    TOKEN_F32 = 7,
    TOKEN_U16 = 8,
    TOKEN_U32 = 100,
} TokenType;

/* Bytes of one token; 0 for anything that is not an integer type. */
int token_type_bytes(TokenType type);
/* "uint16"; "unknown" for codes that do not exist. */
const char *token_type_name(TokenType type);

typedef struct {
    int fd;     /* owned */
    char *path; /* owned */
    int64_t header_bytes;
    int64_t first, tokens; /* the part of the packed stream that it holds */
} TokenSegment;

/* First token of each document in order, 4 bytes a document: the low halves, and for each value of the
 * high half the number of documents before it. */
typedef struct {
    uint32_t *low;        /* (documents) */
    int64_t *before_high; /* (highs + 1): documents whose first token is below h << 32 */
    int64_t documents, highs;
} DocumentIndex;

struct TokenFile {
    bool megatron;
    TokenType type;
    int64_t tokens;
    int n_segments;
    TokenSegment *segments;
    DocumentIndex documents; /* Megatron only */
    int32_t document_token;  /* llm.c only: each document begins with it */
    uint64_t header_hash;    /* Megatron: all of the .idx; llm.c: the headers of all shards */
};

/* tokens: an upper limit of all positions that will be added. */
void document_index_begin(DocumentIndex *index, int64_t documents, int64_t tokens);
/* position: not below the one added before. Returns nothing; adding more than announced dies. */
void document_index_add(DocumentIndex *index, int64_t *n_added, int64_t position);
void document_index_end(DocumentIndex *index, int64_t n_added);
/* First token of document d. */
int64_t document_index_start(const DocumentIndex *index, int64_t d);
/* The last document that begins at or before position (so never an empty one, where position is a token). */
int64_t document_index_find(const DocumentIndex *index, int64_t position);
void document_index_free(DocumentIndex *index);

/* Takes both descriptors, also on failure. bin_path, idx_path: for messages. */
TokenFile *megatron_open(int bin_fd, const char *bin_path, int idx_fd, const char *idx_path, Error *err);
/* The shards in the order given. Descriptors are opened here; paths stay the caller's. */
TokenFile *llmc_open(char *const *paths, int n_paths, Error *err);
/* One shard from a descriptor, taken also on failure. previous: NULL, or the file it is appended to.
 * Returns the file, or NULL with err (previous is then closed). */
TokenFile *llmc_append(TokenFile *previous, int fd, const char *path, Error *err);

/* For tokens [first, first + count), already read: where each one's document begins, counted from
 * first; 0 where it began before. */
void token_file_window_documents(const TokenFile *file, int64_t first, int64_t count, const int32_t *tokens,
                                 int32_t *doc_start);
/* Does a document begin with the token at position? */
bool token_file_begins_document(const TokenFile *file, int64_t position, int32_t token);

/* open(2) for reading; raises the soft limit of open files where that is what is in the way. */
int token_file_descriptor(const char *path, Error *err);

#endif
