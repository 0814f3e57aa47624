#include "vector.h"
