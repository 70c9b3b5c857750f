/* A stand-in for libnccl: communicators take their set bytes of the card, collectives return at once.
 *
 * What is not defined here is made by stubs.py, and answers ncclSuccess. */

#include <stdlib.h>
#include <string.h>

#include "card.h"

typedef struct { int ranks, rank, ordinal; } Communicator;
typedef struct { char internal[128]; } UniqueId;
enum { SUCCESS = 0, CUDA_ERROR = 1 };

static int join(Communicator **communicator, int ranks, int rank) {
  if (card_claim(card_current(), (long long)card_collective_bytes())) return CUDA_ERROR;
  *communicator = malloc(sizeof **communicator);
  **communicator = (Communicator){.ranks = ranks, .rank = rank, .ordinal = card_current()};
  return SUCCESS;
}
static int leave(Communicator *communicator) {
  card_claim(communicator->ordinal, -(long long)card_collective_bytes());
  free(communicator);
  return SUCCESS;
}

int ncclGetVersion(int *version) { return *version = 22705, SUCCESS; }
int ncclGetUniqueId(UniqueId *id) { return memset(id, 1, sizeof *id), SUCCESS; }
int ncclCommInitRank(Communicator **communicator, int ranks, UniqueId id, int rank) { return join(communicator, ranks, rank); }
int ncclCommInitRankConfig(Communicator **communicator, int ranks, UniqueId id, int rank, void *config) {
  return join(communicator, ranks, rank);
}
int ncclCommInitRankScalable(Communicator **communicator, int ranks, int rank, int count, UniqueId *ids, void *config) {
  return join(communicator, ranks, rank);
}
int ncclCommSplit(Communicator *parent, int color, int key, Communicator **communicator, void *config) {
  return join(communicator, parent->ranks, parent->rank);
}
int ncclCommDestroy(Communicator *communicator) { return leave(communicator); }
int ncclCommAbort(Communicator *communicator) { return leave(communicator); }
int ncclCommGetAsyncError(Communicator *communicator, int *error) { return *error = SUCCESS, SUCCESS; }
int ncclCommCount(const Communicator *communicator, int *count) { return *count = communicator->ranks, SUCCESS; }
int ncclCommUserRank(const Communicator *communicator, int *rank) { return *rank = communicator->rank, SUCCESS; }
int ncclCommCuDevice(const Communicator *communicator, int *device) { return *device = communicator->ordinal, SUCCESS; }
const char *ncclGetErrorString(int error) { return error ? "an error of the stand-in card" : "no error"; }
const char *ncclGetLastError(const Communicator *communicator) { return ""; }
