/* ini.h - reads the INI text of config files.
 *
 * UTF-8, a byte-order mark and CRLF are fine. Lines: [section], key = value, include = path (before the
 * first section, relative to the file), blank, comments. # and ; begin a comment at the start of a
 * line or behind white space. "..." keeps # and ; and blanks, with \" \\ \n inside. A \ at the end of a
 * line joins the next. Indentation means nothing. The same key twice in one file is an error; a key set
 * again by the including file, below its include line, overrides. Nothing comes from the environment. */
#ifndef TRIDENT_TRAIN_INI_H
#define TRIDENT_TRAIN_INI_H

#include <stddef.h>
#include <stdio.h>

typedef struct {
    char *section, *key, *value; /* owned */
    char *where;                 /* "file:line", owned */
} IniEntry;

typedef struct {
    IniEntry *entries; /* in the order of reading: later ones override */
    int n, capacity;
    int errors;        /* printed as they were found */
    FILE *out;
} Ini;

/* Reads a file and what it includes, appending to ini. Errors are printed to ini->out and counted. */
void ini_read_file(Ini *ini, const char *path);
/* The same from text; name stands for the file in messages; an include is an error. */
void ini_read_text(Ini *ini, const char *text, size_t bytes, const char *name);
/* "section.key=value" from the command line. */
void ini_read_override(Ini *ini, const char *text);
void ini_free(Ini *ini);

#endif
