/* ini.h - reads the INI text of config files.
 *
 * UTF-8, a byte-order mark and CRLF are fine. Lines: [section], key = value, include = path (before the
 * first section, relative to the file), blank, comments. # and ; begin a comment at the start of a
 * line or behind white space; a value may not begin with one. "..." keeps # and ; and blanks, with \" \\ \n
 * inside. A \ at the end of a line joins the next, except in comments. Indentation means nothing. The same
 * key twice in one file is an error; a key set again by the including file, below its include line,
 * overrides. Nothing comes from the environment. */
#ifndef TRIDENT_TRAIN_INI_H
#define TRIDENT_TRAIN_INI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

typedef struct {
    char *section, *key, *value; /* owned; key and value NULL: the line [section] itself */
    char *where;                 /* "file:line" or "--set", owned */
    int file;                    /* which of the files that were read */
} IniEntry;

typedef struct {
    IniEntry *entries; /* in the order of reading: later ones override */
    int n, capacity;
    int errors; /* printed to out as they were found, the first INI_ERRORS_SHOWN of them */
    int files;  /* read so far */
    FILE *out;
} Ini;

enum { INI_ERRORS_SHOWN = 100, INI_EXCERPT_BYTES = 96 };

/* Reads a file and what it includes, appending to ini. Errors are printed to ini->out and counted. */
void ini_read_file(Ini *ini, const char *path);
/* The same from text; name stands for the file in messages; an include is an error. */
void ini_read_text(Ini *ini, const char *text, size_t bytes, const char *name);
/* "section.key=value" from the command line; the value is taken as it stands, without quotes or comments. */
void ini_read_override(Ini *ini, const char *text);
void ini_free(Ini *ini);

/* False where n errors were shown already; says so once, at the last. */
bool ini_error_shows(FILE *out, int n);
/* The beginning of text as it may stand in a message: short, on one line. Returns excerpt. */
const char *ini_excerpt(const char *text, char excerpt[INI_EXCERPT_BYTES]);

#endif
