/* The stand-in card: its ledger, its contexts, and the regions of memory that a process has of it. */

#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../fakes/nvml/ledger.h"

#define UUID_FORMAT "GPU-5ca1ab1e-0000-4000-8000-%012d" /* as tests/card/card.py writes it for NVML */

static Ledger *ledger;
static Holder *holder;
static int visible[MAX_CARDS], visible_count;
static _Atomic int entered[MAX_CARDS];
static __thread int current;
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void give_everything_back(void) {
  if (!holder || holder->pid != getpid()) return;
  for (int card = 0; card < MAX_CARDS; card++) ledger->used[card] -= atomic_exchange(&holder->bytes[card], 0);
  holder->pid = 0;
}

static void forget_parent(void) { /* CUDA does not survive a fork: the child begins without anything */
  holder = NULL;
  memset((void *)entered, 0, sizeof entered);
}

static int parse_card(const char *name) {
  char uuid[64];
  for (int card = 0; card < (int)ledger->cards; card++) {
    snprintf(uuid, sizeof uuid, UUID_FORMAT, card);
    if (!strcmp(name, uuid)) return card;
  }
  char *end;
  long number = strtol(name, &end, 10);
  return *name && !*end && number >= 0 && number < (long)ledger->cards ? (int)number : -1;
}

static void see_devices(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  char *copy = strdup(list ? list : ""), *rest = copy, *name;
  for (int card = 0; !list && card < (int)ledger->cards; card++) visible[visible_count++] = card;
  while (list && (name = strsep(&rest, ",")) && visible_count < MAX_CARDS) {
    int card = parse_card(name);
    if (card < 0) break; /* as CUDA does: what follows an unknown device is not seen */
    visible[visible_count++] = card;
  }
  free(copy);
}

static void open_card(void) {
  ledger = open_ledger(getenv("CARD_LEDGER"));
  if (!ledger) return;
  see_devices();
  atexit(give_everything_back);
  pthread_atfork(NULL, NULL, forget_parent);
}

static Holder *hold(void) {
  if (holder) return holder;
  for (int i = 0; i < MAX_HOLDERS && !holder; i++) {
    int nobody = 0;
    if (atomic_compare_exchange_strong(&ledger->holders[i].pid, &nobody, getpid())) holder = &ledger->holders[i];
  }
  if (!holder) abort();
  return holder;
}

int card_count(void) {
  pthread_once(&opened, open_card);
  return visible_count;
}

int card_of(int ordinal) { return ordinal >= 0 && ordinal < card_count() ? visible[ordinal] : -1; }

int card_current(void) { return current; }

void card_select(int ordinal) { current = ordinal; }

static int fits(int card, u64 bytes) {
  unsigned long long used = ledger->used[card];
  while (used + bytes <= ledger->total[card])
    if (atomic_compare_exchange_weak(&ledger->used[card], &used, used + bytes)) return 1;
  return 0;
}

static int take(int card, long long bytes) {
  if (bytes > 0 && !fits(card, (u64)bytes)) {
    reclaim(ledger);
    if (!fits(card, (u64)bytes)) return 2;
  }
  if (bytes < 0) ledger->used[card] -= (u64)-bytes;
  hold()->bytes[card] += (u64)bytes;
  return 0;
}

int card_enter(int ordinal) {
  int card = card_of(ordinal);
  if (card < 0) return 101; /* cudaErrorInvalidDevice */
  if (entered[card]) return 0;
  pthread_mutex_lock(&lock);
  int error = entered[card] ? 0 : take(card, (long long)ledger->context_bytes);
  entered[card] = !error;
  pthread_mutex_unlock(&lock);
  return error;
}

int card_claim(int ordinal, long long bytes) {
  int error = card_enter(ordinal);
  if (error) return error;
  pthread_mutex_lock(&lock);
  error = take(card_of(ordinal), bytes);
  pthread_mutex_unlock(&lock);
  return error;
}

u64 card_collective_bytes(void) { return card_count() ? ledger->collective_bytes : 0; }

void card_info(int ordinal, size_t *free_bytes, size_t *total_bytes) {
  int card = card_of(ordinal);
  reclaim(ledger);
  u64 used = ledger->used[card];
  *total_bytes = ledger->total[card];
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
}

void *card_reserve(size_t bytes) {
  char *raw = mmap(0, bytes + CARD_GRAIN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  char *start = (char *)(((u64)raw + CARD_GRAIN - 1) & ~(u64)(CARD_GRAIN - 1));
  if (start > raw) munmap(raw, (size_t)(start - raw));
  munmap(start + bytes, (size_t)(raw + CARD_GRAIN - start));
  madvise(start, bytes, MADV_NOHUGEPAGE); /* one byte that is touched must not back 2 MiB */
  return start;
}

/* Sorted by address, so that an address inside a region finds it. */
static Region *regions;
static size_t region_count, region_room;

static size_t place_of(const void *address) { /* how many regions begin at or before the address */
  size_t low = 0, high = region_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (regions[middle].start <= (const char *)address) low = middle + 1;
    else high = middle;
  }
  return low;
}

void card_remember(Region region) {
  pthread_mutex_lock(&lock);
  if (region_count == region_room) {
    region_room = region_room ? 2 * region_room : 1024;
    regions = realloc(regions, region_room * sizeof *regions);
    if (!regions) abort();
  }
  size_t place = place_of(region.start);
  memmove(regions + place + 1, regions + place, (region_count++ - place) * sizeof *regions);
  regions[place] = region;
  pthread_mutex_unlock(&lock);
}

int card_find(const void *address, Region *found) {
  pthread_mutex_lock(&lock);
  size_t place = place_of(address);
  int inside = place && (const char *)address < regions[place - 1].start + regions[place - 1].size;
  if (inside) *found = regions[place - 1];
  pthread_mutex_unlock(&lock);
  return inside;
}

int card_forget(const void *start, Region *removed) {
  pthread_mutex_lock(&lock);
  size_t place = place_of(start);
  int known = place && regions[place - 1].start == start;
  if (known) {
    *removed = regions[place - 1];
    memmove(regions + place - 1, regions + place, (region_count-- - place) * sizeof *regions);
  }
  pthread_mutex_unlock(&lock);
  return known;
}
