/* safetensors.c - headers of safetensors files, made and read.
 * In: entries, or the bytes of a header. Out: bytes, or entries in file order.
 * Invariant: what is read is a partition of the file's data bytes, each entry as long as its shape and type
 * say; nothing in a header can make the reader run out of its bounds. */
#include "train/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { LENGTH_BYTES = 8 };
static const int64_t HEADER_BYTES_MAX = 100000000; /* the reference reader's limit */

static const struct {
    const char *name;
    int bits;
    DType dtype;
} types[] = {
    {"F64", 64, DT_F64},          {"F32", 32, DT_F32},          {"BF16", 16, DT_BF16},    {"F16", 16, DT_F16},
    {"I32", 32, DT_I32},          {"I64", 64, DT_COUNT},        {"U64", 64, DT_COUNT},    {"U32", 32, DT_COUNT},
    {"I16", 16, DT_COUNT},        {"U16", 16, DT_COUNT},        {"I8", 8, DT_COUNT},      {"U8", 8, DT_COUNT},
    {"BOOL", 8, DT_COUNT},        {"C64", 64, DT_COUNT},        {"F8_E4M3", 8, DT_COUNT}, {"F8_E5M2", 8, DT_COUNT},
    {"F8_E8M0", 8, DT_COUNT},     {"F4", 4, DT_COUNT},          {"F6_E2M3", 6, DT_COUNT}, {"F6_E3M2", 6, DT_COUNT},
    {"F8_E4M3FNUZ", 8, DT_COUNT}, {"F8_E5M2FNUZ", 8, DT_COUNT},
};
enum { N_TYPES = sizeof types / sizeof types[0] };

static int find_type(const char *name) {
    int i = 0;
    while (i < N_TYPES && strcmp(types[i].name, name) != 0) i++;
    return i;
}

const char *safetensors_type(DType dtype) {
    for (int i = 0; i < N_TYPES; i++) {
        if (types[i].dtype == dtype && dtype != DT_COUNT) return types[i].name;
    }
    return NULL;
}

DType safetensors_dtype(const char *type) {
    const int i = find_type(type);
    return i < N_TYPES ? types[i].dtype : DT_COUNT;
}

static json_t *entry_to_json(const SafetensorsEntry *entry, int64_t begin) {
    json_t *shape = json_array();
    for (int i = 0; i < entry->dims; i++) json_array_append_new(shape, json_integer(entry->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", entry->type, "shape", shape, "data_offsets", (json_int_t)begin,
                     (json_int_t)(begin + entry->bytes));
}

/* NULL with err. */
static char *header_text(const SafetensorsEntry *entries, int n, Error *err) {
    json_t *root = json_object(), *notes = json_object();
    char *text = NULL;
    /* Readers of other programs want to know whose conventions the values follow. */
    json_object_set_new(notes, "format", json_string("pt"));
    json_object_set(root, "__metadata__", notes);
    int64_t begin = 0;
    for (int i = 0; i < n; i++) {
        const SafetensorsEntry *entry = &entries[i];
        int failed = json_object_get(root, entry->name) != NULL;
        failed |= json_object_set_new(root, entry->name, entry_to_json(entry, begin));
        if (entry->note) failed |= json_object_set_new(notes, entry->name, json_string(entry->note));
        if (failed) {
            error_set(err, EXIT_CHECKPOINT, "\"%s\" cannot name a tensor in a file: it comes twice, or is not UTF-8",
                      entry->name);
            goto done;
        }
        begin += entry->bytes;
    }
    text = json_dumps(root, JSON_COMPACT);
    if (!text) error_set(err, EXIT_CHECKPOINT, "out of memory for the header of %d tensors", n);
done:
    json_decref(notes);
    json_decref(root);
    return text;
}

char *safetensors_header(const SafetensorsEntry *entries, int n, int64_t alignment, int64_t *header_bytes, Error *err) {
    char *text = header_text(entries, n, err);
    if (!text) return NULL;
    const int64_t text_bytes = (int64_t)strlen(text);
    *header_bytes = round_up(LENGTH_BYTES + text_bytes, alignment);
    if (*header_bytes - LENGTH_BYTES > HEADER_BYTES_MAX) {
        error_set(err, EXIT_CHECKPOINT, "%d tensors need a header of %" PRId64 " bytes, the format allows %" PRId64, n,
                  text_bytes, HEADER_BYTES_MAX);
        free(text);
        return NULL;
    }
    char *header = xmalloc((uint64_t)*header_bytes);
    memset(header, ' ', (size_t)*header_bytes);
    const uint64_t length = (uint64_t)(*header_bytes - LENGTH_BYTES);
    for (int i = 0; i < LENGTH_BYTES; i++) header[i] = (char)(length >> (8 * i) & 0xff);
    memcpy(header + LENGTH_BYTES, text, (size_t)text_bytes);
    free(text);
    return header;
}

static uint64_t little_endian(const char *bytes) {
    uint64_t value = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) value = value << 8 | (uint8_t)bytes[i];
    return value;
}

char *safetensors_read_header(int fd, const char *path, int64_t file_bytes, int64_t *header_bytes, Error *err) {
    char first[LENGTH_BYTES];
    if (file_bytes < LENGTH_BYTES) {
        error_set(err, EXIT_CHECKPOINT, "%s: has %" PRId64 " bytes: too short for a safetensors file", path,
                  file_bytes);
        return NULL;
    }
    if (file_read_at(fd, path, first, sizeof first, 0, err, EXIT_CHECKPOINT) != 0) return NULL;
    const uint64_t length = little_endian(first);
    if (length > (uint64_t)HEADER_BYTES_MAX || (int64_t)length > file_bytes - LENGTH_BYTES) {
        error_set(err, EXIT_CHECKPOINT,
                  "%s: its first 8 bytes announce a header of %" PRIu64 " bytes; the file has %" PRId64
                  ", the format allows %" PRId64,
                  path, length, file_bytes, HEADER_BYTES_MAX);
        return NULL;
    }
    *header_bytes = LENGTH_BYTES + (int64_t)length;
    char *header = xmalloc((uint64_t)*header_bytes);
    if (file_read_at(fd, path, header, (size_t)*header_bytes, 0, err, EXIT_CHECKPOINT) != 0) {
        free(header);
        return NULL;
    }
    return header;
}

/* A number that can be an extent or a position. */
static bool natural(const json_t *value, int64_t *number) {
    *number = json_is_integer(value) ? json_integer_value(value) : -1;
    return *number >= 0;
}

/* The bytes that shape and type say, or -1. */
static int64_t described_bytes(const SafetensorsEntry *entry, int bits) {
    int64_t total = bits;
    for (int i = 0; i < entry->dims; i++) {
        if (__builtin_mul_overflow(total, entry->shape[i], &total)) return -1;
    }
    return total % 8 ? -1 : total / 8;
}

static int parse_entry(const char *path, const char *name, const json_t *value, int64_t header_bytes,
                       SafetensorsEntry *entry, Error *err) {
    const char *type = json_string_value(json_object_get(value, "dtype"));
    const json_t *shape = json_object_get(value, "shape"), *offsets = json_object_get(value, "data_offsets");
    const int kind = type ? find_type(type) : N_TYPES;
    if (kind == N_TYPES) {
        return error_set(err, EXIT_CHECKPOINT, "%s: tensor \"%s\" has the unknown dtype %s", path, name,
                         type ? type : "(none)");
    }
    entry->type = types[kind].name;
    bool good = json_is_array(shape) && json_array_size(shape) <= SAFETENSORS_DIMS_MAX;
    entry->dims = good ? (int)json_array_size(shape) : 0;
    for (int i = 0; i < entry->dims; i++) good &= natural(json_array_get(shape, (size_t)i), &entry->shape[i]);
    if (!good) {
        return error_set(err, EXIT_CHECKPOINT, "%s: tensor \"%s\" has no shape of at most %d whole numbers", path, name,
                         SAFETENSORS_DIMS_MAX);
    }
    int64_t begin, end;
    good = json_is_array(offsets) && json_array_size(offsets) == 2 && natural(json_array_get(offsets, 0), &begin) &&
           natural(json_array_get(offsets, 1), &end) && begin <= end && end <= INT64_MAX - header_bytes;
    if (!good) {
        return error_set(err, EXIT_CHECKPOINT, "%s: tensor \"%s\" has no data_offsets of two ascending numbers", path,
                         name);
    }
    entry->first_byte = header_bytes + begin;
    entry->bytes = end - begin;
    if (described_bytes(entry, types[kind].bits) != entry->bytes) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s: tensor \"%s\" has %" PRId64 " bytes, which its dtype %s and its "
                         "shape do not give",
                         path, name, entry->bytes, entry->type);
    }
    return 0;
}

static int parse_entries(const char *path, json_t *root, int64_t header_bytes, Safetensors *file, Error *err) {
    const json_t *notes = json_object_get(root, "__metadata__");
    if (notes && !json_is_object(notes)) {
        return error_set(err, EXIT_CHECKPOINT, "%s: __metadata__ is not an object", path);
    }
    const char *name;
    json_t *value;
    file->entries = xcalloc(json_object_size(root), sizeof *file->entries);
    json_object_foreach(root, name, value) {
        if (strcmp(name, "__metadata__") == 0) continue;
        SafetensorsEntry *entry = &file->entries[file->n];
        if (parse_entry(path, name, value, header_bytes, entry, err) != 0) return -1;
        const char *note = json_string_value(json_object_get(notes, name));
        entry->name = xstrdup(name);
        entry->note = note ? xstrdup(note) : NULL;
        file->n++;
    }
    return 0;
}

static int by_position(const void *a, const void *b) {
    const SafetensorsEntry *x = a, *y = b;
    /* An empty tensor lies before the one that begins at the same byte. */
    if (x->first_byte != y->first_byte) return x->first_byte < y->first_byte ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int check_partition(const char *path, const Safetensors *file, int64_t header_bytes, int64_t file_bytes,
                           Error *err) {
    int64_t expected = header_bytes;
    for (int i = 0; i < file->n; i++) {
        const SafetensorsEntry *entry = &file->entries[i];
        if (entry->first_byte != expected) {
            return error_set(err, EXIT_CHECKPOINT,
                             "%s: tensor \"%s\" begins at byte %" PRId64 ", the one before it "
                             "ends at %" PRId64,
                             path, entry->name, entry->first_byte, expected);
        }
        expected += entry->bytes;
    }
    if (expected == file_bytes) return 0;
    return error_set(err, EXIT_CHECKPOINT, "%s: has %" PRId64 " bytes, its tensors end at %" PRId64, path, file_bytes,
                     expected);
}

int safetensors_parse(const char *path, const char *header, int64_t header_bytes, int64_t file_bytes, Safetensors *file,
                      Error *err) {
    *file = (Safetensors){0};
    json_error_t where;
    const char *text = header + LENGTH_BYTES;
    const size_t text_bytes = (size_t)(header_bytes - LENGTH_BYTES);
    /* The format wants the first byte to be the brace. */
    json_t *root = text_bytes && text[0] == '{' ? json_loadb(text, text_bytes, JSON_REJECT_DUPLICATES, &where) : NULL;
    if (!root) {
        return error_set(err, EXIT_CHECKPOINT, "%s: its header is not a JSON object: %s", path,
                         text_bytes && text[0] == '{' ? where.text : "it does not begin with a brace");
    }
    int rc = parse_entries(path, root, header_bytes, file, err);
    json_decref(root);
    if (rc == 0) {
        qsort(file->entries, (size_t)file->n, sizeof *file->entries, by_position);
        rc = check_partition(path, file, header_bytes, file_bytes, err);
    }
    if (rc != 0) safetensors_free(file);
    return rc;
}

void safetensors_free(Safetensors *file) {
    for (int i = 0; i < file->n; i++) {
        free(file->entries[i].name);
        free(file->entries[i].note);
    }
    free(file->entries);
    *file = (Safetensors){0};
}
