/* config_table.h - the one table of settings, and what the files of the config share. */
#ifndef TRIDENT_TRAIN_CONFIG_TABLE_H
#define TRIDENT_TRAIN_CONFIG_TABLE_H

#include "train/config.h"
#include "train/ini.h"

typedef enum {
    TYPE_INT,      /* int */
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
    size_t offset;           /* in Config */
    const char *fallback;    /* as a user would write it */
    double min, max;         /* of numbers */
    const char *unit;        /* "" where none */
    const char *const *choices; /* NULL-terminated, TYPE_CHOICE; index = enum value */
    ResumePolicy resume;
    const char *help;
} Setting;

extern const Setting settings[];
extern const int n_settings;

/* The setting, or NULL. */
const Setting *setting_find(const char *section, const char *key);
/* Parses text into the field of config. 0, or -1 with what would be right in problem. */
int setting_parse(const Setting *setting, Config *config, const char *text, char problem[256]);
/* The value as INI text that parses back to the same; caller frees. */
char *setting_format(const Setting *setting, const Config *config);

/* Prints one error and counts it. where: "file:line", or the key's name where it has its default. */
typedef struct {
    FILE *out;
    int n;
    char *const *where; /* (n_settings) place of each value, NULL: default */
} Complaints;
void complain_about(Complaints *complaints, const char *section_key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Rules between values that need no world: errors are printed. */
void config_check_rules(const Config *config, Complaints *complaints);

#endif
