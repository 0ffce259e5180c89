reportPage().begin();
