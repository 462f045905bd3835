/* config_table.h - the one table of settings, and what the files of the config share. */
#ifndef TRIDENT_TRAIN_CONFIG_TABLE_H
#define TRIDENT_TRAIN_CONFIG_TABLE_H

#include "train/config.h"
#include "train/ini.h"

typedef enum {
    TYPE_INT, /* int */
    TYPE_INT64,
    TYPE_DOUBLE,
    TYPE_BOOL,     /* bool: yes or no */
    TYPE_CHOICE,   /* an enum, stored as int */
    TYPE_TEXT,     /* char *, owned */
    TYPE_DURATION, /* double seconds: 30s, 10m, 2h */
} SettingType;

/* What a resume may do with a changed value. */
typedef enum { RESUME_FREE, RESUME_WARN, RESUME_REFUSE } ResumePolicy;

typedef struct {
    const char *section, *key;
    SettingType type;
    size_t offset;              /* in Config */
    const char *fallback;       /* as a user would write it */
    double min, max;            /* of numbers */
    const char *unit;           /* "" where none */
    const char *const *choices; /* NULL-terminated, TYPE_CHOICE; index = enum value */
    ResumePolicy resume;
    const char *help;
} Setting;

/* max of numbers without an upper bound of their own: what int64 holds, roughly. */
#define SETTING_MAX_NONE 9e18

extern const Setting settings[];
extern const int n_settings;

/* The setting, or NULL. */
const Setting *setting_find(const char *section, const char *key);
/* Parses text into the field of config. 0, or -1 with what would be right in problem, and the field as it was. */
int setting_parse(const Setting *setting, Config *config, const char *text, char problem[256]);
/* The value as INI text that parses back to the same; caller frees. */
char *setting_format(const Setting *setting, const Config *config);
/* "from 1 to 64", "at least 1"; "" where the setting is no number. Returns text. */
const char *setting_bounds(const Setting *setting, char text[96]);

/* Errors of one config, printed and counted. */
typedef struct {
    FILE *out;
    int n;
    const char *name;   /* of the config file, leads where no value has a place */
    char *const *where; /* (n_settings) place of each value, NULL: default */
    const bool *bad;    /* (n_settings) the value did not parse; NULL: all did */
    bool incomplete;    /* a line was refused: a value at its default may not be what the user meant */
} Complaints;

/* A broken rule between settings. keys: "section.key section.key ..." of all that the rule looks at; the place of the
 * first leads the message, those of the others follow it. Says nothing where one of them is not as the user meant. */
void complain_about(Complaints *complaints, const char *keys, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The line that refers to no known setting, with what was probably meant. entry->key NULL: the section. */
void complain_unknown(Complaints *complaints, const IniEntry *entry);
/* The known section that was meant, or NULL. */
const char *section_meant(const char *section);

/* Rules between values that need no launcher: errors are printed. */
void config_check_rules(const Config *config, Complaints *complaints);
/* global_batch must be a multiple of micro_batch x data. */
void config_check_batch(const Config *config, int64_t data, Complaints *complaints);

#endif
