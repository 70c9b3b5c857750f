/* What the CUDA stand-ins share. libcudart has the one copy of it; libcuda and libnccl find these functions there. */

#ifndef CARD_H
#define CARD_H

#include <stddef.h>

typedef unsigned long long u64;

/* The card of a device ordinal of this process, by CUDA_VISIBLE_DEVICES; -1: there is none. */
int card_of(int ordinal);
int card_count(void);
int card_current(void); /* this thread's device ordinal */
void card_select(int ordinal);

/* Count the context of this process on a card, once. 0, or 2 where it does not fit. */
int card_enter(int ordinal);

/* Take or give back bytes of a device. 0, or 2 where they do not fit. */
int card_claim(int ordinal, long long bytes);
void card_info(int ordinal, size_t *free_bytes, size_t *total_bytes);

/* Address space that nothing backs until it is touched, 2 MiB aligned; 0 where the machine has none. */
u64 card_collective_bytes(void); /* what a communicator of NCCL takes */

void *card_reserve(size_t bytes);
#define CARD_GRAIN (2ul << 20)

/* Regions by address: device memory, pinned host memory, mapped handles. */
enum { REGION_DEVICE = 1, REGION_HOST, REGION_MAPPED, REGION_REGISTERED };
typedef struct { char *start; size_t size; int kind, ordinal; void *handle; } Region;
void card_remember(Region region);
int card_find(const void *address, Region *found);   /* 1: address lies in a region */
int card_forget(const void *start, Region *removed); /* 1: a region began there */

#endif
